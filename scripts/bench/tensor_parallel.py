"""Time a tensor-parallel training step against transformers' own, and one process against stock.

    python scripts/bench/tensor_parallel.py [--rounds 7] [--out scripts/bench/results/tensor_parallel.json]

Two rank processes and one single process, each with one thread, stay alive; per round each candidate trains one step
(forward, backward, AdamW) in turn, so that all see the same machine. Ratios are medians of the per-round ratios.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from report import write_report
from transformers import AutoModelForCausalLM, LlamaConfig

import hfscale
from hfscale.testing import RankPool


@dataclass(frozen=True)
class Size:
    """One model and batch; goals are those of the project."""

    hidden: int
    sequence: int
    vocabulary: int
    goal: float
    batch: int = 4
    layers: int = 4


SIZES = (Size(768, 512, 32000, 0.60), Size(512, 256, 8192, 0.80), Size(256, 256, 4096, 0.60))
# Layouts of hfscale by candidate; the others are transformers' own.
LAYOUTS: dict[str, dict[str, Any]] = {
    "hfscale": {},
    "hfscale tp2": {"tp_size": 2},
    "hfscale tp2, no overlap": {"tp_size": 2, "overlap": False},
    "hfscale tp2, sequence parallel": {"tp_size": 2, "sequence_parallel": True},
}
CANDIDATES = (
    "native tp2",
    "hfscale tp2",
    "native tp2, split groups",
    *list(LAYOUTS)[2:],
    "stock",
    "hfscale",
)
_state: dict[str, Any] = {}


def build(kind: str, path: str, size: Size) -> None:
    """Load a model and its optimizer into this process."""
    if kind.startswith("native"):
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_size=2)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, distributed_config=config
        )
    elif kind == "stock":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    else:
        layout = hfscale.ParallelConfig(**LAYOUTS[kind])
        model = hfscale.from_pretrained(path, parallel=layout, dtype=torch.float32)
    optimizer = build_optimizer(model, kind)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size.vocabulary, (size.batch, size.sequence), generator=generator)
    _state[kind] = (model.train(), optimizer, ids)


def build_optimizer(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    """The fastest AdamW that takes the model's parameters.

    Native tensor parallelism mixes DTensors with plain tensors, which the fused and the foreach steps refuse, so
    ``AdamW(model.parameters())`` runs one tensor at a time there. ``native tp2, split groups`` is the same model with a
    fused step over DTensors and another over plain tensors, which a user has to know to write.
    """
    if kind == "native tp2":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    groups: dict[type, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)


def step(kind: str) -> tuple[float, float]:
    """Seconds and loss of one step."""
    model, optimizer, ids = _state[kind]
    start = time.perf_counter()
    if kind.startswith("hfscale"):
        loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    else:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start, loss.item()


def drop() -> None:
    """Forget the models of this process."""
    _state.clear()


def measure(size: Size, rounds: int, pools: dict[int, RankPool]) -> dict[str, Any]:
    """Interleave the candidates; returns medians, ratios and losses."""
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=int(size.hidden * 2.6875),
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        num_key_value_heads=size.hidden // 64,
        vocab_size=size.vocabulary,
    )
    times: dict[str, list[float]] = {kind: [] for kind in CANDIDATES}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as path:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
        world = {kind: 2 if "tp2" in kind else 1 for kind in CANDIDATES}
        for kind in CANDIDATES:
            pools[world[kind]].run(build, kind, path, size)
        for index in range(rounds + 2):
            for kind in CANDIDATES:
                results = pools[world[kind]].run(step, kind)
                losses[kind] = results[0][1]
                if index >= 2:  # two rounds of warm-up
                    times[kind].append(max(seconds for seconds, _ in results))
        for pool in pools.values():
            pool.run(drop)
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))

    return {
        "size": asdict(size),
        "seconds": {kind: round(statistics.median(values), 4) for kind, values in times.items()},
        "hfscale tp2 / native tp2": round(ratio("hfscale tp2", "native tp2"), 3),
        "goal": size.goal,
        "hfscale tp2 / native tp2, split groups": round(
            ratio("hfscale tp2", "native tp2, split groups"), 3
        ),
        "overlap / no overlap": round(ratio("hfscale tp2", "hfscale tp2, no overlap"), 3),
        "sequence parallel / without": round(
            ratio("hfscale tp2, sequence parallel", "hfscale tp2"), 3
        ),
        "hfscale tp2 / stock": round(ratio("hfscale tp2", "stock"), 3),
        "hfscale / stock": round(ratio("hfscale", "stock"), 3),
        "loss after all rounds": losses,
    }


def main() -> None:
    """Run all sizes and print one report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", type=int, help="run only the size with this hidden width")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pools = {world: RankPool(world, timeout=600, as_large=False) for world in (1, 2)}
    results = []
    for size in SIZES:
        if arguments.only in (None, size.hidden):
            results.append(measure(size, arguments.rounds, pools))
            print(json.dumps(results[-1], indent=1), flush=True)
    for pool in pools.values():
        pool.close()
    write_report(arguments.out, results, torch, transformers, accelerate, hfscale)


if __name__ == "__main__":
    main()
