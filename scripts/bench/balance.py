"""Simulate how long data ranks take for rows of different lengths, dealt round-robin or shared out by cost.

    python scripts/bench/balance.py [--steps 16] [--out scripts/bench/results/balance.json]

No model runs: a row of ``n`` tokens costs ``n + n * n * c``, with ``c`` the planner's for Llama 8B on an H100
(``pair_cost``). A step ends with its slowest rank, and under FSDP2 so does each of its microbatches. Printed is the
time of a step over that of the same rows without padding, spread evenly. Two kinds of batches:

- padded: rows of a microbatch are as long as its longest; ``random`` deals a random order, ``cost`` is
  ``train_sampling_strategy="batch_rebalance"``;
- packed: rows lie behind each other, without padding, each attending to itself; dealt round-robin, or by
  ``share_by_cost``.

With ``--sleep chat code`` four processes run steps of a tiny model, two data ranks of two stages each, whose layers
sleep for as long as their microbatch would take: real schedules and waits, rows by ``hfscale.balanced_batches`` or as
they come.
"""

import argparse
import bisect
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig
from transformers.trainer_pt_utils import BatchRebalanceSampler

import hfscale
from hfscale.cost.model.step_time import pair_cost
from hfscale.plan.cost_shares import share_by_cost
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

LONGEST = 8192  # of lognormal lengths
# Shares of published rows that are no longer than so many tokens; between them lengths are spread evenly.
QUANTILES: dict[str, tuple[tuple[float, ...], tuple[int, ...]]] = {
    # Tokens of requests and answers in Azure's traces of 2023, 19,366 of chats and 8,819 of code (Patel et al. 2024,
    # github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_{conv,code}.csv).
    "azure chat": (
        (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1),
        (64, 296, 368, 473, 506, 800, 1412, 1469, 1522, 1628, 2820, 4136, 4259, 6345, 14089),
    ),
    "azure code": (
        (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1),
        (12, 95, 167, 411, 798, 1099, 1493, 1937, 2455, 3224, 5223, 7343, 7462, 7841),
    ),
    # 13.5 million documents, as MagiAttention's benchmark draws them, without the 0.44 % beyond 32,768 tokens
    # (github.com/SandAI-org/MagiAttention, exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv).
    "documents": (
        (0, 0.0023, 0.0314, 0.0836, 0.1864, 0.4695, 0.7170, 0.8741, 0.9479, 0.9785, 0.9914, 1),
        (1, 10, 50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768),
    ),
}


def spread(table: tuple[tuple[float, ...], tuple[int, ...]], draw: random.Random) -> float:
    """Return a length drawn from a table of quantiles."""
    shares, lengths = table
    share = draw.random()
    above = bisect.bisect_right(shares, share)
    (low, high), (short, long) = shares[above - 1 : above + 1], lengths[above - 1 : above + 1]
    return short + (share - low) / (high - low) * (long - short)


LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "chat": lambda draw: draw.lognormvariate(6.2, 0.9),  # median 490 tokens
    "web": lambda draw: draw.lognormvariate(6.9, 1.1),  # median 990
    "code": lambda draw: draw.lognormvariate(7.2, 1.4),  # median 1340, a tenth is longest
    "mixed": lambda draw: draw.choice(
        (draw.lognormvariate(5, 0.5), draw.lognormvariate(8.5, 0.4))
    ),  # short and long
    **{kind: partial(spread, table) for kind, table in QUANTILES.items()},
}
# tokens that stand for one in a sleeping stage, and that take it a second
SHRUNK = 64
TOKENS = 10_000
NAMES = ("padded random", "padded cost", "packed random", "packed cost")
RUNS = [(8, 1, 8), (8, 4, 4), (32, 4, 4)]  # data ranks, microbatches, rows of a microbatch


def length_of_row(kind: str, draw: random.Random, least: int) -> int:
    """Return a length between ``least`` and the longest of its kind."""
    longest = QUANTILES[kind][1][-1] if kind in QUANTILES else LONGEST
    return min(longest, max(least, int(LENGTHS[kind](draw))))


def llama_cost() -> float:
    """Return the cost of a pair of tokens in Llama 8B."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    return pair_cost(hfscale.plan(config), config)


def simulate(
    kind: str, ranks: int, microbatches: int, rows: int, steps: int, cost: float
) -> dict[str, float]:
    """Return the time of all steps over the ideal one, by how rows are shared out."""
    draw = random.Random(f"{kind} {ranks} {microbatches}")
    bins = ranks * microbatches
    size = ranks * microbatches * rows
    lengths = [length_of_row(kind, draw, 8) for _ in range(size * steps)]
    samplers = [
        BatchRebalanceSampler(lengths, size, ranks, microbatches, shuffle=False, rank=r)
        for r in range(ranks)
    ]
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

    found = dict.fromkeys(NAMES, 0.0)
    ideal = 0.0
    for step in range(steps):
        drawn = lengths[step * size : (step + 1) * size]
        ideal += packed(drawn) / ranks
        dealt = [drawn[start : start + rows] for start in range(0, size, rows)]
        balanced = [
            [lengths[index] for index in next(stream)]
            for _ in range(microbatches)
            for stream in streams
        ]
        shares = share_by_cost(list(map(seconds, drawn)), bins)
        filled = [[drawn[item] for item in items] for items in shares]
        for name, groups, of in (
            ("padded random", dealt, padded),
            ("padded cost", balanced, padded),
            ("packed random", dealt, packed),
            ("packed cost", filled, packed),
        ):
            found[name] += slowest(groups, of)
    return {name: total / ideal for name, total in found.items()}


def collated(rows: list[Tensor], padded: bool) -> dict[str, Tensor]:
    """Return rows as a batch: padded to the longest, or behind each other."""
    if padded:
        labels = pad_sequence(rows, batch_first=True, padding_value=-100)
        return {
            "input_ids": labels.clamp(min=0),
            "labels": labels,
            "attention_mask": (labels >= 0).long(),
        }
    ids = torch.cat(rows)[None]
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    return {"input_ids": ids, "labels": torch.where(places == 0, -100, ids), "position_ids": places}


class Sleeps:
    """Let a layer sleep for as long as a microbatch would take: forward once, backward twice."""

    def __init__(self, layer: Any, cost: float) -> None:
        self.cost, self.waiting = cost * SHRUNK, list[float]()
        layer.register_forward_pre_hook(self.forward, with_kwargs=True)
        layer.register_full_backward_pre_hook(self.backward)

    def forward(self, _: Any, args: Any, kwargs: Any) -> None:
        """Sleep a second for ``TOKENS`` tokens, and for the squares of texts, whose positions begin anew."""
        places = kwargs["position_ids"].expand(args[0].shape[:2])
        self.waiting.append(SHRUNK / TOKENS * float((1 + self.cost * (2 * places + 1)).sum()))
        time.sleep(self.waiting[-1])

    def backward(self, *_: Any) -> None:
        """Sleep for the oldest microbatch's backward pass."""
        time.sleep(2 * self.waiting.pop(0))


def sleep_through(kind: str, padded: bool, balanced: bool, steps: int, cost: float) -> float:
    """Return the seconds of a step over the mean, over ranks, of the time that rows without padding take there."""
    ranks = 2
    microbatches = 4
    size = 32
    layout = hfscale.ParallelConfig(pp_size=2, dp_replicate_size=ranks)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = hfscale.from_config(LlamaConfig(vocab_size=64, **sizes), parallel=layout).train()
    runtime = runtime_of(model)
    for layer in filter(runtime.is_local, runtime.plan.layers):
        Sleeps(model.get_submodule(layer), cost)
    draw = random.Random(kind)
    lengths = [length_of_row(kind, draw, 2 * SHRUNK) // SHRUNK for _ in range(size * steps)]
    given: Any = hfscale.balanced_batches(
        model, lengths, size, microbatches, padded=padded, shuffle=False
    )
    given.QUADRATIC_COST_COEF = cost * SHRUNK
    if not balanced:
        own = range(hfscale.batch_rank(model), ranks * microbatches * steps, ranks)
        given = [list(range(place * 4, place * 4 + 4)) for place in own]
    collate = partial(collated, padded=padded)
    batches = iter(
        DataLoader(
            [torch.ones(n, dtype=torch.int64) for n in lengths],
            batch_sampler=given,
            collate_fn=collate,
        )
    )
    began = time.perf_counter()
    for _ in range(steps):
        hfscale.train_step(model, [next(batches) for _ in range(microbatches)])
    ideal = sum(n + cost * SHRUNK * n * n for n in lengths) * 3 * SHRUNK / TOKENS / ranks
    return (time.perf_counter() - began) / ideal


def main() -> None:
    """Print a table, and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sleep", nargs="+", default=[], choices=LENGTHS, metavar="LENGTHS")
    arguments = parser.parse_args()
    cost = llama_cost()
    table = []
    print(
        f"a pair of tokens costs {cost:.2e} of a token: as much as the rest at {1 / cost:,.0f} tokens"
    )
    for kind in LENGTHS:
        for ranks, microbatches, rows in RUNS:
            steps = max(1, arguments.steps * 8 // ranks)
            found = simulate(kind, ranks, microbatches, rows, steps, cost)
            table.append(
                {
                    "lengths": kind,
                    "ranks": ranks,
                    "microbatches": microbatches,
                    "rows": rows,
                    **found,
                }
            )
            print(
                kind,
                ranks,
                microbatches,
                rows,
                *(f"{name} {ratio:.2f}" for name, ratio in found.items()),
                sep="  ",
            )
    slept = dict[str, dict[str, float]]()
    if arguments.sleep:
        with RankPool(4, timeout=600) as pool:
            for kind in arguments.sleep:
                how = [(padded, balanced) for padded in (True, False) for balanced in (False, True)]
                taken = [max(pool.run(sleep_through, kind, *each, 3, cost)) for each in how]
                slept[kind] = dict(zip(NAMES, taken, strict=True))
                print(
                    "slept",
                    kind,
                    *(f"{name} {ratio:.2f}" for name, ratio in slept[kind].items()),
                    sep="  ",
                )
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"pair_cost": cost, "runs": table, "slept": slept}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
