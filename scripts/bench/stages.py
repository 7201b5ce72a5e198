"""Time a step through real pipeline stages against the same model cut by hand for torch.distributed.pipelining.

    python scripts/bench/stages.py [--rounds 7] [--out scripts/bench/results/stages.json]

Two rank processes with one thread each train a Llama: forward and backward passes of 8 microbatches of 1 x 256 tokens,
clipping by the global norm, fused AdamW. Per schedule, a round lets each candidate train one step in turn, so that all
see the same machine; ratios are medians of the per-round ratios:

- ``hfscale``: ``hfscale.train_step``, ``hfscale.clip_grad_norm_``;
- ``by hand``: :mod:`hand_cut`, the stock loss over whole logits;
- ``by hand, same loss``: the same with the loss that hfscale uses, which leaves the pipeline alone as a difference;
- ``one process``: the stock model, which is not cut, one microbatch after the other.

Before, losses, norms and all gradients of the candidates are compared.
"""

import argparse
import cProfile
import io
import json
import pstats
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from hand_cut import HandCut
from report import write_report
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import hfscale
from hfscale.config.schedules import schedule_of
from hfscale.parallel.pipeline.recorder import Recorder
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

GOAL = 1.03
SCHEDULES = ("1f1b", "gpipe", "interleaved1f1b", "zbv")
CANDIDATES = ("hfscale", "by hand", "by hand, same loss", "one process")
PIPELINED = CANDIDATES[:3]
_state: dict[str, Any] = {}


@dataclass(frozen=True)
class Size:
    """One model and batch."""

    hidden: int
    layers: int = 8
    heads: int = 8
    vocabulary: int = 8192
    microbatches: int = 8
    tokens: int = 256

    def config(self) -> LlamaConfig:
        """The model."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=int(self.hidden * 2.6875),
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=self.vocabulary,
        )


SIZES = (Size(512), Size(768))


def build(kind: str, path: str, schedule: str, size: Size) -> None:
    """Load a candidate and its optimizer into this process; ``by hand`` is cut where hfscale cuts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size.vocabulary, (size.microbatches, size.tokens), generator=generator)
    virtual = schedule_of(schedule).default_stages
    if kind == "one process":
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    elif kind == "hfscale":
        layout = hfscale.ParallelConfig(
            pp_size=2,
            pipeline_schedule=schedule,
            virtual_stages=virtual,
            num_microbatches=size.microbatches,
        )
        model = hfscale.from_pretrained(path, parallel=layout, dtype=torch.float32).train()
    else:
        stages = runtime_of(_state["hfscale"][0]).plan.stages
        assert stages is not None
        cut = [len(stage.layers) for stage in stages.stages]
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
        model = HandCut(
            whole, schedule, cut, stages.ranks, size.microbatches, stock_loss=kind == "by hand"
        )
    parameters = (
        [p for stage in model.stages for p in stage.parameters()]
        if "hand" in kind
        else model.parameters()
    )
    _state[kind] = (model, torch.optim.AdamW(parameters, lr=1e-4, fused=True), ids)


def backward(kind: str) -> Tensor:
    """Loss of one step, with gradients left in ``.grad``."""
    model, _, ids = _state[kind]
    if kind == "hfscale":
        return hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    if kind != "one process":
        found: Tensor = model.train_step(ids)
        return found
    total = torch.zeros(())
    count = (ids.shape[1] - 1) * len(ids)
    for row in ids.split(1):
        loss = model(input_ids=row, labels=row, use_cache=False, num_items_in_batch=count).loss
        loss.backward()
        total += loss.detach()
    return total


def step(kind: str, profile: bool = False) -> dict[str, Any]:
    """Seconds, processor seconds, loss and norm of one step, and where Python spent its time."""
    model, optimizer, _ = _state[kind]
    if kind != "one process":
        dist.barrier()
    profiler = cProfile.Profile(time.thread_time) if profile else None
    if profiler:
        profiler.enable()
    start = time.perf_counter()
    processor = time.process_time()
    loss = backward(kind)
    if kind == "hfscale":
        norm = hfscale.clip_grad_norm_(model, 1.0)
    elif kind == "one process":
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        norm = model.clip(1.0)
    optimizer.step()
    optimizer.zero_grad()
    answer: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - processor,
    }
    if profiler:
        profiler.disable()
    return {
        **answer,
        "results": (loss.item(), norm.item()),
        "profile": _told(profiler) if profiler else "",
    }


def _told(profiler: cProfile.Profile) -> str:
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(45)
    return text.getvalue()


def compare() -> tuple[float, float]:
    """On every rank: worst relative difference of a gradient, and of the loss, between the pipelined candidates."""
    losses = []
    gradients = []
    for kind in PIPELINED:
        losses.append(backward(kind).item())
        model = _state[kind][0]
        named = model.named_parameters()
        gradients.append({name: p.grad for name, p in named if p.grad is not None})
    worst = 0.0
    for found in gradients[:-1]:
        assert found.keys() == gradients[-1].keys(), found.keys() ^ gradients[-1].keys()
        for name, grad in found.items():
            other = gradients[-1][name]
            worst = max(worst, float((grad - other).abs().max() / other.abs().max()))
    for kind in PIPELINED:
        _state[kind][1].zero_grad()
    return worst, max(losses) / min(losses) - 1


def actions() -> dict[str, float]:
    """Seconds in the actions of one step of hfscale's, by kind."""
    pipeline = runtime_of(_state["hfscale"][0]).executor
    recorder = Recorder()
    assert pipeline is not None
    for worker in pipeline.workers:
        worker.recorder = recorder
    dist.barrier()
    recorder.start()
    start = time.perf_counter()
    backward("hfscale")
    kinds: dict[str, float] = {"step": time.perf_counter() - start}
    for action, begin, end in recorder.record.events:
        kinds[action.kind] = kinds.get(action.kind, 0.0) + (end - begin) * 1e-9
    for worker in pipeline.workers:
        worker.recorder = None
    _state["hfscale"][1].zero_grad()
    return kinds


def drop() -> None:
    """Forget the models of this process."""
    _state.clear()


def measure(
    size: Size,
    schedule: str,
    path: str,
    rounds: int,
    pools: dict[int, RankPool],
    profile: str | None,
) -> dict[str, Any]:
    """Interleave the candidates; returns medians and ratios."""
    world = {kind: 1 if kind == "one process" else 2 for kind in CANDIDATES}
    for kind in CANDIDATES:
        pools[world[kind]].run(build, kind, path, schedule, size)
    compared = pools[2].run(compare)
    worst = max(gradient for gradient, _ in compared)
    assert worst < 1e-3, f"gradients differ by {worst}"
    assert max(loss for _, loss in compared) < 1e-5, compared
    times: dict[str, list[float]] = {kind: [] for kind in CANDIDATES}
    processor: dict[str, list[float]] = {kind: [] for kind in CANDIDATES}
    last: dict[str, tuple[float, float]] = {}
    for index in range(rounds + 2):
        for kind in CANDIDATES:
            results = pools[world[kind]].run(step, kind)
            last[kind] = results[0]["results"]
            assert len({result["results"] for result in results}) == 1, (
                f"{kind}: ranks differ, {results}"
            )
            if index >= 2:  # two rounds of warm-up
                times[kind].append(max(result["seconds"] for result in results))
                processor[kind].append(sum(result["cpu"] for result in results))
    for values in zip(*last.values(), strict=True):  # loss, norm
        assert max(values) / min(values) - 1 < 1e-3, last
    if profile:
        for result in pools[2].run(step, profile, True):
            print(result["profile"])
    recorded = pools[2].run(actions)
    for pool in pools.values():
        pool.run(drop)

    def ratio(taken: dict[str, list[float]], other: str) -> float:
        return round(
            statistics.median(x / y for x, y in zip(taken["hfscale"], taken[other], strict=True)), 3
        )

    return {
        "schedule": schedule,
        "size": asdict(size),
        "seconds": {kind: round(statistics.median(values), 4) for kind, values in times.items()},
        **{f"hfscale / {kind}": ratio(times, kind) for kind in CANDIDATES[1:]},
        "goal": GOAL,
        # Of all ranks together: what a busy machine distorts least.
        "processor seconds": {
            kind: round(statistics.median(values), 4) for kind, values in processor.items()
        },
        **{f"hfscale / {kind}, processor": ratio(processor, kind) for kind in CANDIDATES[1:]},
        "gradients differ by": worst,
        "seconds in actions, by rank": [
            {kind: round(value, 4) for kind, value in rank.items()} for rank in recorded
        ],
    }


def main() -> None:
    """Run all sizes and print one report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--only", type=int, help="run only the size with this hidden width")
    parser.add_argument(
        "--profile",
        choices=PIPELINED,
        help="also print where this candidate's Python spends a step",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pools = {world: RankPool(world, timeout=600) for world in (1, 2)}
    results = []
    for size in SIZES:
        if arguments.only not in (None, size.hidden):
            continue
        with tempfile.TemporaryDirectory() as path:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(size.config(), dtype=torch.float32).save_pretrained(
                path
            )
            for schedule in arguments.schedules:
                row = measure(size, schedule, path, arguments.rounds, pools, arguments.profile)
                results.append(row)
                print(json.dumps(row, indent=1), flush=True)
    for pool in pools.values():
        pool.close()
    write_report(arguments.out, results, torch, transformers, hfscale)


if __name__ == "__main__":
    main()
