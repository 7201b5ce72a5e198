"""A slow rank is named, by how long the others wait for it; one long step names nobody."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.train import step_times
from hfscale.train.step_times import compared, in_a_line, worked

from ..tiny_models import tiny


def told(late: list[float]) -> Any:
    """Steps of a second, in each of which a rank comes to a collective so late."""
    starts = [float(step - len(late)) for step in range(len(late) + 1)]
    calls = [
        (("g", 0, number), start + each)
        for number, (start, each) in enumerate(zip(starts, late, strict=False))
    ]
    return starts, calls, []


def test_the_rank_that_comes_last_is_slow() -> None:
    step, works = compared([told([0.1] * 9), told([0.1] * 9), told([0.7] * 9)])
    assert step == pytest.approx(1)
    assert works == pytest.approx([0.4, 0.4, 1.0])
    found = in_a_line(step, works)
    assert (
        found
        == "rank 2 works 1 s on a step, 2.5x the median of the others, who wait 0.6 s of 1 s for it"
    )


def test_one_long_step_names_nobody() -> None:
    assert in_a_line(*compared([told([0.1] * 9), told([0.1] * 8 + [0.9])])) == ""


def test_time_outside_waits_that_overlap() -> None:
    """Of a window's thousands of waits, each is looked at once, however many steps there are."""
    waits = [(7.0, 7.5), (-1.0, 0.5), (1.0, 3.0), (2.0, 2.5), (2.5, 4.25), (5.0, 5.0), (5.5, 9.0)]
    assert worked(iter(waits), [0.0, 2.0, 4.0, 5.0, 6.0, 10.0]) == [0.0, 0.5, 0.5, 1.25, 1.75, 2.75]
    calls = [(("g", 0, number), number / 160) for number in range(32_000)]
    every = [([float(step) for step in range(201)], calls, [])] * 2
    begin = time.process_time()
    assert compared(every) == (1.0, [1.0, 1.0])
    assert time.process_time() - begin < 1  # 0.07 s; 4 s where each step looks at all


def test_nothing_recorded() -> None:
    assert compared([([-2.0, -1.0], [], []), told([0.1])]) == (0.0, [])


def trained(layout: ParallelConfig, slow: int) -> dict[str, float]:
    step_times._FIRST = 5
    model = hfscale.from_config(tiny("llama", num_hidden_layers=2), parallel=layout).train()
    rank = torch.distributed.get_rank()
    for name, module in model.named_modules():
        if rank == slow and name.endswith("mlp"):
            module.register_forward_hook(lambda *_: time.sleep(0.15))
    ids = torch.randint(0, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(7):
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return hfscale.metrics(model)


SLOW = [
    pytest.param(axis, marks=pytest.mark.slow)
    for axis in ("tp_size", "pp_size", "dp_replicate_size")
]


@pytest.mark.parametrize("axis", ["dp_shard_size", *SLOW])
def test_a_rank_that_sleeps_is_named(pools: Callable[[int], RankPool], axis: str) -> None:
    every = pools(2).run(trained, ParallelConfig(**{axis: 2}), 1)
    assert every[0] == every[1]
    found = every[0]
    assert found["work_seconds/rank_1"] > found["work_seconds/rank_0"] + 0.1, found
