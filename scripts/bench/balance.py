"""Simulate how long data ranks take for rows of different lengths, dealt round-robin or shared out by cost.

    python scripts/bench/balance.py [--steps 16] [--out scripts/bench/results/balance.json]

No model runs: a row of ``n`` tokens costs ``n + n * n * c``, with ``c`` the planner's for Llama 8B on an H100
(``pair_cost``). A step ends with its slowest rank, and under FSDP2 so does each of its microbatches. Printed is the
time of a step over that of the same rows without padding, spread evenly. Two kinds of batches:

- padded: rows of a microbatch are as long as its longest; ``random`` deals a random order, ``cost`` is
  ``train_sampling_strategy="batch_rebalance"``;
- packed: rows lie behind each other, without padding, each attending to itself; dealt round-robin, or by
  ``share_by_cost``.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import LlamaConfig
from transformers.trainer_pt_utils import BatchRebalanceSampler

import hfscale
from hfscale.cost.model.machines_known import find_machine, fitted
from hfscale.cost.model.step_time import pair_cost
from hfscale.plan.cost_shares import share_by_cost

LONGEST = 8192
LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "chat": lambda draw: draw.lognormvariate(6.2, 0.9),  # median 490 tokens
    "web": lambda draw: draw.lognormvariate(6.9, 1.1),  # median 990
    "code": lambda draw: draw.lognormvariate(7.2, 1.4),  # median 1340, a tenth is longest
    "mixed": lambda draw: draw.choice((draw.lognormvariate(5, 0.5), draw.lognormvariate(8.5, 0.4))),  # short and long
}
RUNS = [(8, 1, 8), (8, 4, 4), (32, 4, 4)]  # data ranks, microbatches, rows of a microbatch


def llama_cost() -> float:
    """Return the cost of a pair of tokens in Llama 8B."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_key_value_heads=8, vocab_size=128256
    )
    return pair_cost(hfscale.plan(config), config, find_machine("h100"), fitted())


def simulate(kind: str, ranks: int, microbatches: int, rows: int, steps: int, cost: float) -> dict[str, float]:
    """Return the time of all steps over the ideal one, by how rows are shared out."""
    draw = random.Random(f"{kind} {ranks} {microbatches}")
    bins, size = ranks * microbatches, ranks * microbatches * rows
    lengths = [min(LONGEST, max(8, int(LENGTHS[kind](draw)))) for _ in range(size * steps)]
    samplers = [BatchRebalanceSampler(lengths, size, ranks, microbatches, shuffle=False, rank=r) for r in range(ranks)]
    for sampler in samplers:
        sampler.QUADRATIC_COST_COEF = cost
    streams = [iter(sampler) for sampler in samplers]

    def seconds(length: int) -> float:
        return length + cost * length * length

    def padded(batch: Sequence[int]) -> float:
        return len(batch) * seconds(max(batch, default=0))

    def packed(batch: Sequence[int]) -> float:
        return sum(map(seconds, batch))

    def slowest(groups: Sequence[Sequence[int]], of: Callable[[Sequence[int]], float]) -> float:
        """Time of a step whose microbatch ``m`` on rank ``r`` is ``groups[m * ranks + r]``."""
        return sum(max(map(of, groups[start : start + ranks])) for start in range(0, bins, ranks))

    found = dict.fromkeys(("padded random", "padded cost", "packed random", "packed cost"), 0.0)
    ideal = 0.0
    for step in range(steps):
        drawn = lengths[step * size : (step + 1) * size]
        ideal += packed(drawn) / ranks
        dealt = [drawn[start : start + rows] for start in range(0, size, rows)]
        balanced = [[lengths[index] for index in next(stream)] for _ in range(microbatches) for stream in streams]
        places = share_by_cost(list(map(seconds, drawn)), bins)
        filled = [[row for row, place in zip(drawn, places, strict=True) if place == each] for each in range(bins)]
        for name, groups, of in (
            ("padded random", dealt, padded),
            ("padded cost", balanced, padded),
            ("packed random", dealt, packed),
            ("packed cost", filled, packed),
        ):
            found[name] += slowest(groups, of)
    return {name: total / ideal for name, total in found.items()}


def main() -> None:
    """Print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cost, table = llama_cost(), []
    print(f"a pair of tokens costs {cost:.2e} of a token: as much as the rest at {1 / cost:,.0f} tokens")
    for kind in LENGTHS:
        for ranks, microbatches, rows in RUNS:
            steps = max(1, arguments.steps * 8 // ranks)
            found = simulate(kind, ranks, microbatches, rows, steps, cost)
            table.append({"lengths": kind, "ranks": ranks, "microbatches": microbatches, "rows": rows, **found})
            print(kind, ranks, microbatches, rows, *(f"{name} {ratio:.2f}" for name, ratio in found.items()), sep="  ")
    if arguments.out:
        arguments.out.write_text(json.dumps({"pair_cost": cost, "runs": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
