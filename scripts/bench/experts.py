"""Time a step of expert parallelism against transformers' own, and against one process; count what is exchanged.

    python scripts/bench/experts.py [--rounds 7] [--out scripts/bench/results/experts.json]
    python scripts/bench/experts.py --only native     # or hfscale: one side alone, with one process
    python scripts/bench/experts.py --gpu             # one MoE block alone on a CUDA device, by implementation

A small Qwen3-MoE with 8 and with 64 experts, top 2, in fp32, on two rank processes with one thread each, in two
arrangements: experts spread over data ranks, each of which has its own 4 x 256 tokens, and over tensor ranks, which
have the same 4 x 256 tokens. All candidates stay alive; a round lets each train in turn, so that all see the same
machine, and ratios are medians of the per-round ratios:

- ``native``: ``from_pretrained(distributed_config=DistributedConfig(...))`` of transformers;
- ``hfscale``: ``hfscale.from_pretrained``, ``hfscale.train_step``;
- ``one process``: the stock model on one thread with the 4 x 256 tokens of the first rank.

Each in three modes: ``backward`` is forward and backward alone, ``step`` adds ``AdamW(model.parameters())``, and
``step, fused`` adds fused AdamW, for which a user of DTensors over several meshes has to group parameters. Before,
losses are compared, and collectives are counted by kind: in a whole step, and by layer, which is the difference to a
model with fewer layers. Of the k rows for each token that a rank routes, there and back, forward and backward,
``even`` is what leaves the rank if experts are chosen evenly, (ranks - 1) / ranks, and ``as routed`` what leaves it as
the model chooses, where the rank has a contiguous part of the tokens and of the experts. Over two tensor ranks hfscale
sums instead, which is as many bytes as ``even``: what is counted as all-to-all there are these sums and attention's,
which gloo sends faster so (hfscale/distributed/ops/collectives.py).
"""

import argparse
import itertools
import json
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from _exchanges import Exchanges, count_exchanges, rows_away, summary
from _expert_block import measure_blocks
from report import write_report
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import hfscale
from hfscale.testing import RankPool
from hfscale.testing.pool import RankError

RANKS = 2
KINDS = ("one process", "native", "hfscale")
MODES = ("backward", "step", "step, fused")
STEP_GOAL = 0.70
MANY_EXPERTS_GOAL = 1.2
LOSS_TOLERANCE = 1e-4
WARM_UP = 2
# Arrangement -> sizes of transformers' DistributedConfig, sizes of hfscale's ParallelConfig.
ARRANGEMENTS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "data": ({"ep_size": RANKS, "fsdp_size": RANKS}, {"ep_size": RANKS, "dp_shard_size": RANKS}),
    "tensor": ({"ep_size": RANKS, "tp_size": RANKS}, {"ep_size": RANKS, "tp_size": RANKS}),
}
Times = dict[tuple[str, int, str], list[float]]  # by candidate, number of experts and mode
_state: dict[tuple[str, int], Any] = {}


@dataclass(frozen=True)
class Size:
    """One model and batch."""

    experts: int
    layers: int = 4
    hidden: int = 256
    width: int = 256
    top: int = 2
    heads: int = 8
    vocabulary: int = 4096
    batch: int = 4
    sequence: int = 256

    def config(self) -> Qwen3MoeConfig:
        """The model."""
        return Qwen3MoeConfig(
            hidden_size=self.hidden,
            moe_intermediate_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=self.hidden // self.heads,
            vocab_size=self.vocabulary,
            num_experts=self.experts,
            num_experts_per_tok=self.top,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )

    def even(self, arrangement: str) -> int:
        """Bytes that leave a rank in the all-to-alls of a layer if experts are chosen evenly."""
        tokens = self.batch * self.sequence // (RANKS if arrangement == "tensor" else 1)
        return 4 * self.top * tokens * self.hidden * (RANKS - 1) // RANKS * torch.float32.itemsize


def build(kind: str, arrangement: str, path: str, size: Size) -> str:
    """Load a candidate and its optimizers into this process; returns the implementation of its experts."""
    native, ours = ARRANGEMENTS[arrangement]
    if kind == "native":
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(**native)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, distributed_config=config
        )
    elif kind == "hfscale":
        layout = hfscale.ParallelConfig(**ours)
        model = hfscale.from_pretrained(path, parallel=layout, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizers = {
        "step": torch.optim.AdamW(model.parameters(), lr=1e-4),
        "step, fused": torch.optim.AdamW(_groups(model), lr=1e-4, fused=True),
    }
    batches = [batch_of(size, index) for index in range(RANKS if arrangement == "data" else 1)]
    _state[kind, size.experts] = (model.train(), optimizers, batches)
    return str(model.config._experts_implementation)


def batch_of(size: Size, index: int) -> Tensor:
    """Tokens of a distinct batch."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, size.vocabulary, (size.batch, size.sequence), generator=generator)


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Parameters by kind of tensor and by mesh, which one fused step does not mix."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        key = (type(parameter.data), getattr(parameter.data, "device_mesh", None))
        groups.setdefault(key, []).append(parameter)
    return [{"params": group} for group in groups.values()]


def backward(kind: str, experts: int, index: int | None = None) -> Tensor:
    """Loss on this rank's batch, or on batch ``index``, with gradients left in ``.grad``."""
    model, _, batches = _state[kind, experts]
    if index is None:
        index = 0 if kind == "one process" or len(batches) == 1 else dist.get_rank()
    if kind == "hfscale":
        return hfscale.train_step(model, {"input_ids": batches[index], "labels": batches[index]})
    loss: Tensor = model(input_ids=batches[index], labels=batches[index], use_cache=False).loss
    loss.backward()
    return loss.detach()


def step(kind: str, experts: int, mode: str) -> tuple[float, float, float]:
    """Seconds, processor seconds and loss of one step."""
    model, optimizers, _ = _state[kind, experts]
    dist.barrier()
    start = time.perf_counter()
    processor = time.process_time()
    loss = backward(kind, experts)
    if mode in optimizers:
        optimizers[mode].step()
    model.zero_grad()
    return time.perf_counter() - start, time.process_time() - processor, loss.item()


def loss_of(kind: str, experts: int) -> float:
    """Mean loss over all distinct batches, as far as this rank can tell."""
    model, _, batches = _state[kind, experts]
    indices = range(len(batches)) if kind == "one process" else [None]
    losses = [backward(kind, experts, index).item() for index in indices]
    model.zero_grad()
    return statistics.mean(losses)


def count(kind: str, experts: int) -> Exchanges:
    """What this rank exchanges in forward and backward."""
    with count_exchanges() as exchanges:
        backward(kind, experts)
    _state[kind, experts][0].zero_grad()
    return exchanges


def as_routed(kind: str, experts: int) -> float:
    """Bytes per layer that must leave a rank in all-to-alls, from what the routers of this whole model choose."""
    model, _, batches = _state[kind, experts]
    rows = rows_away(model, batches, experts // RANKS, RANKS)
    return float(4 * rows * model.config.hidden_size * torch.float32.itemsize)


def profiled(kind: str, experts: int) -> str:
    """Where this rank spends one fused step, by operator and shapes."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step(kind, experts, "step, fused")
    averages = profiler.key_averages(group_by_input_shape=True)
    return averages.table(
        sort_by="self_cpu_time_total",
        row_limit=40,
        max_name_column_width=45,
        max_shapes_column_width=60,
    )


def drop() -> None:
    """Forget the models of this process."""
    _state.clear()


class Bench:
    """The pools, and the models saved for them."""

    def __init__(self, kinds: tuple[str, ...], directory: str) -> None:
        self.kinds, self.directory = kinds, Path(directory)
        self.pools = {ranks: RankPool(ranks, timeout=600) for ranks in (1, RANKS)}

    def run(self, kind: str, function: Any, *args: Any) -> list[Any]:
        """``function(kind, *args)`` on the ranks of a kind."""
        try:
            return self.pools[1 if kind == "one process" else RANKS].run(function, kind, *args)
        except RankError as error:
            if "PlanError" not in str(error):
                raise
            reason = str(error).strip().splitlines()[-1]
            raise SystemExit(
                f"hfscale does not run this layout: {reason}\n--only native times the rest"
            ) from error

    def drop(self) -> None:
        """Forget all models."""
        for pool in self.pools.values():
            pool.run(drop)

    def close(self) -> None:
        """Stop the ranks."""
        for pool in self.pools.values():
            pool.close()

    def saved(self, size: Size) -> str:
        """Directory of a model; it is made once."""
        path = self.directory / f"{size.experts}-{size.layers}"
        if not path.exists():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(size.config(), dtype=torch.float32).save_pretrained(
                path
            )
        return str(path)

    def compare(self, experts: int) -> dict[str, float]:
        """The candidates' losses; raises if they differ."""
        losses = {kind: statistics.mean(self.run(kind, loss_of, experts)) for kind in self.kinds}
        if not max(losses.values()) - min(losses.values()) < LOSS_TOLERANCE:
            raise AssertionError(f"losses differ with {experts} experts: {losses}")
        return losses

    def count(self, arrangement: str, size: Size) -> dict[str, Any]:
        """Traffic of the parallel candidates: collectives in a step and in a layer, bytes of all-to-alls."""
        shallow = Size(size.experts, layers=size.layers // 2)
        self.run(KINDS[0], build, arrangement, self.saved(size), size)
        routed = self.run(KINDS[0], as_routed, size.experts)[0]
        sent = {"even": size.even(arrangement), "as routed": routed}
        counted: dict[str, Any] = {"bytes of all-to-all per layer": sent}
        for kind in self.kinds[1:]:
            found = {}
            for model in (shallow, size):
                self.run(kind, build, arrangement, self.saved(model), model)
                found[model.layers] = self.run(kind, count, size.experts)
            counted[kind] = summary(
                found[size.layers], found[shallow.layers], size.layers, shallow.layers
            )
            sent[kind] = (
                statistics.mean(rank.sent["all-to-all"] for rank in found[size.layers])
                / size.layers
            )
            sent[f"{kind} / as routed"] = round(sent[kind] / routed, 4)
        return counted

    def time(self, sizes: list[Size], rounds: int) -> tuple[Times, Times, dict[Any, float]]:
        """Seconds and processor seconds by candidate, number of experts and mode and by round; last losses."""
        times: Times = {}
        processor: Times = {}
        losses: dict[Any, float] = {}
        for index in range(rounds + WARM_UP):
            for mode in MODES:
                for kind, size in itertools.product(self.kinds, sizes):
                    seconds, busy, loss = zip(
                        *self.run(kind, step, size.experts, mode), strict=True
                    )
                    losses[kind, size.experts] = statistics.mean(loss)
                    if index >= WARM_UP:
                        times.setdefault((kind, size.experts, mode), []).append(max(seconds))
                        processor.setdefault((kind, size.experts, mode), []).append(sum(busy))
        return times, processor, losses


def measure(
    bench: Bench, arrangement: str, sizes: list[Size], rounds: int, profile_of: str | None
) -> dict[str, Any]:
    """Count, compare and time one arrangement."""
    traffic = {str(size.experts): bench.count(arrangement, size) for size in sizes}
    bench.drop()
    implementations = {}
    for kind in bench.kinds:
        for size in sizes:
            implementations[kind] = bench.run(kind, build, arrangement, bench.saved(size), size)[0]
    before = {size.experts: bench.compare(size.experts) for size in sizes}
    times, processor, last = bench.time(sizes, rounds)
    if profile_of:
        for size in sizes:
            print(f"{profile_of}, {arrangement}, {size.experts} experts")
            print(bench.run(profile_of, profiled, size.experts)[0], flush=True)
    bench.drop()
    row: dict[str, Any] = {
        "arrangement": arrangement,
        "implementation of experts": implementations,
        "goal of hfscale / native, step": STEP_GOAL,
    }
    for size in sizes:
        row[f"{size.experts} experts"] = {
            "size": asdict(size),
            **_ratios(times, bench.kinds, size.experts),
            # Of all ranks together: what a busy machine distorts least.
            "processor": _ratios(processor, bench.kinds, size.experts),
            "first loss": before[size.experts],
            "last loss": {kind: last[kind, size.experts] for kind in bench.kinds},
            "traffic": traffic[str(size.experts)],
        }
    if len(sizes) > 1:
        few = sizes[0].experts
        many = sizes[-1].experts
        row[f"backward, {many} experts / {few} experts"] = {
            kind: _ratio(times, (kind, many, "backward"), (kind, few, "backward"))
            for kind in bench.kinds
        } | {"goal": MANY_EXPERTS_GOAL}
    return row


def _ratios(times: Times, kinds: tuple[str, ...], experts: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "seconds": {
            kind: {mode: round(statistics.median(times[kind, experts, mode]), 4) for mode in MODES}
            for kind in kinds
        }
    }
    pairs = [("hfscale", "native"), ("hfscale", "one process"), ("native", "one process")]
    for kind, other in pairs:
        if kind in kinds and other in kinds:
            row[f"{kind} / {other}"] = {
                mode: _ratio(times, (kind, experts, mode), (other, experts, mode)) for mode in MODES
            }
    if "hfscale" in kinds and "native" in kinds:
        # What each does best as documented: native's plain parameters do not fit one fused optimizer.
        row["hfscale, step, fused / native, step"] = _ratio(
            times, ("hfscale", experts, "step, fused"), ("native", experts, "step")
        )
    return row


def _ratio(times: Times, one: Any, other: Any) -> float:
    return round(statistics.median(x / y for x, y in zip(times[one], times[other], strict=True)), 3)


def _gpu(rounds: int, out: Path | None) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("--gpu needs a CUDA device")
    rows = measure_blocks(rounds)
    libraries = {
        library.__name__: library.__version__ for library in (torch, transformers, hfscale)
    }
    report = {
        "machine": torch.cuda.get_device_name(),
        "versions": {**libraries, "python": platform.python_version()},
        "results": rows,
    }
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Run the arrangements and write one report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=KINDS[1:], help="leave out the other parallel candidate")
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument(
        "--arrangements", nargs="+", default=list(ARRANGEMENTS), choices=ARRANGEMENTS
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        const="hfscale",
        choices=KINDS,
        help="also print where the first rank spends a step",
    )
    parser.add_argument(
        "--gpu", action="store_true", help="time one MoE block alone on a CUDA device instead"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.gpu:
        _gpu(arguments.rounds, arguments.out)
        return
    kinds = tuple(kind for kind in KINDS if arguments.only in (None, kind) or kind == "one process")
    if arguments.profile not in (None, *kinds):
        parser.error(f"--profile {arguments.profile} is not among {', '.join(kinds)}")
    results = []
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(kinds, directory)
        try:
            for arrangement in arguments.arrangements:
                sizes = [Size(experts) for experts in sorted(arguments.experts)]
                results.append(
                    measure(bench, arrangement, sizes, arguments.rounds, arguments.profile)
                )
                print(json.dumps(results[-1], indent=1), flush=True)
        finally:
            bench.close()
    write_report(arguments.out, results, torch, transformers, hfscale)


if __name__ == "__main__":
    main()
