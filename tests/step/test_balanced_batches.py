"""Rows shared out by cost: no bin holds much more than the others, and a step's arithmetic does not change."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import hfscale
from hfscale import ParallelConfig
from hfscale.integrations.accelerator import Accelerator
from hfscale.plan.cost_shares import share_by_cost
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
MICROBATCHES = 2
ROWS = 11


def test_no_bin_costs_more_than_the_bound() -> None:
    draw = random.Random(0)
    for _ in range(50):
        bins = draw.randint(1, 8)
        costs = [draw.lognormvariate(0, 1.5) for _ in range(draw.randint(1, 60))]
        found = share_by_cost(costs, bins)
        assert sorted(item for items in found for item in items) == list(range(len(costs)))
        loads = [sum(costs[item] for item in items) for items in found]
        least = max(max(costs), sum(costs) / bins)
        # Graham's bound of any list.
        assert max(loads) <= least + max(costs) * (1 - 1 / bins) + 1e-9
        assert len(costs) < bins or min(loads) > 0
    assert share_by_cost([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]


def rows_of(seed: int, count: int = 11) -> list[Tensor]:
    draw = random.Random(seed)
    lengths = [min(40, max(2, int(draw.lognormvariate(2, 0.8)))) for _ in range(count)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 67, (length,), generator=generator) for length in lengths]


def collated(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = pad_sequence(rows, batch_first=True)
    labels = pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def train(layout: dict[str, Any], seed: int, by_cost: bool) -> dict[str, Tensor]:
    """Losses and gradients of two steps, whose rows go round-robin or by cost, and the weights after them."""
    rows = rows_of(seed, 2 * ROWS + 1)
    model = hfscale.from_config(
        tiny("llama", vocab_size=67), parallel=ParallelConfig(**layout), seed=1, dtype=torch.float64
    ).train()
    runtime = runtime_of(model)
    world = runtime.mesh.batch_world
    rank = runtime.mesh.batch_rank
    optimizer = hfscale.create_optimizer(model, "sgd", lr=0.1, momentum=0.9)
    found: dict[str, Tensor] = {}
    lengths = [len(row) for row in rows]
    sampler: Any = hfscale.balanced_batches(
        model, lengths, ROWS, MICROBATCHES, padded=seed != 1, shuffle=False
    )
    if not by_cost:
        starts = [
            step * ROWS + bin
            for step in range(2)
            for bin in range(rank, world * MICROBATCHES, world)
        ]
        sampler = [
            list(range(start, (start // ROWS + 1) * ROWS, world * MICROBATCHES)) for start in starts
        ]
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=collated)  # type: ignore[arg-type]
    if by_cost:
        AcceleratorState._reset_state()  # a precision that another test has asked for
        model, loader = Accelerator().prepare(model, loader)
    batches = iter(loader)
    for step in range(2):
        optimizer.zero_grad()
        found[f"loss {step}"] = hfscale.train_step(
            model, [next(batches) for _ in range(MICROBATCHES)]
        )
        for planned, parameter in runtime.parameters():
            assert parameter.grad is not None
            found[f"{planned.name} grad {step}"] = local_tensor(parameter.grad).clone()
        optimizer.step()
    assert next(batches, None) is None
    weights = {
        planned.name: local_tensor(parameter.detach()).clone()
        for planned, parameter in runtime.parameters()
    }
    return found | weights


@pytest.mark.daily("layout0-0")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "layout", [{"dp_shard_size": 2}, {"pp_size": 2}, {"tp_size": 2, "dp_replicate_size": 2}]
)
def test_a_step_is_the_same(pools: Pools, layout: dict[str, Any], seed: int) -> None:
    ranks = ParallelConfig(**layout).total_size
    for plain, balanced in zip(
        *(pools(ranks).run(train, layout, seed, how) for how in (False, True)), strict=True
    ):
        assert plain.keys() == balanced.keys()
        for name, value in plain.items():
            torch.testing.assert_close(balanced[name], value, rtol=0, atol=1e-12)
