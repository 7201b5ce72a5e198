"""Orders of actions: complete, able to run, and refused with the values that would do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from hfscale.config.schedules import schedule_names, schedule_of
from hfscale.errors import ConfigError
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.simulation import simulate
from hfscale.parallel.pipeline.timeline import GRADIENT, RELEASE, Action, peak_live, stage_ranks

SYNCHRONOUS = [schedule for schedule in schedule_names() if not schedule.startswith("pipedream")]


def _sizes(schedule: str) -> list[tuple[int, int, int]]:
    virtual = [v for v in (1, 2, 3) if v in schedule_of(schedule).stages_per_rank]
    least = 2 if schedule == "dualpipev" else 1
    return [
        (p, factor * p, v)
        for p in (1, 2, 3, 4, 8)
        for factor in (1, 2, 4)
        if factor >= least
        for v in virtual
    ]


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_every_action_once_and_no_deadlock(schedule: str) -> None:
    for p, m, v in _sizes(schedule):
        actions = order(schedule, p, m, v)
        assert len(actions) == p
        everything = [(stage, index) for stage in range(p * v) for index in range(m)]
        for kinds in (("forward",), GRADIENT, RELEASE):
            found = [(a.stage, a.microbatch) for rank in actions for a in rank if a.kind in kinds]
            assert sorted(found) == everything
        simulate(actions)


CLASSES = {
    "interleaved1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


@pytest.mark.parametrize("schedule", CLASSES)
def test_orders_are_those_of_torchs_classes(schedule: str) -> None:
    compared = 0
    for p, m, v in ((p, m, v) for p in range(1, 6) for m in range(1, 12) for v in (1, 2, 3)):
        try:
            mine = order(schedule, p, m, v)
        except ConfigError:  # which torch refuses as well, or calls by another name
            continue
        assert mine == _torchs(CLASSES[schedule], p, m, v), (p, m, v)
        compared += 1
    assert compared >= 30


LETTERS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def _torchs(name: str, pp_size: int, num_microbatches: int, virtual_stages: int) -> Any:
    """The order of torch's class, which builds it from the counts of a stage; its waits are left out."""
    count = pp_size * virtual_stages
    stages = [
        SimpleNamespace(
            stage_index=index * pp_size,
            num_stages=count,
            group_size=pp_size,
            group_rank=0,
            is_first=index == 0,
            is_last=index * pp_size == count - 1,
            submod=torch.nn.Identity(),
        )
        for index in range(virtual_stages)
    ]
    build: Any = get_schedule_class(name)
    rows = build(stages, num_microbatches).pipeline_order
    return tuple(
        tuple(part for action in rows[rank] if action is not None for part in _parts(action))
        for rank in range(pp_size)
    )


def _parts(action: Any) -> list[Action]:
    parts = action.sub_actions or (action,)
    return [
        Action(
            part.stage_index,
            LETTERS[part.computation_type.value],
            part.microbatch_index,
            paired=n < len(parts) - 1,
        )
        for n, part in enumerate(parts)
    ]


def test_where_the_stages_live() -> None:
    assert stage_ranks(order("interleaved1f1b", 2, 4, 3)) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    for schedule in ("zbv", "dualpipev"):
        assert stage_ranks(order(schedule, 3, 6, 2)) == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}


def test_1f1b_spelled_out() -> None:
    first, last = order("1f1b", 2, 3)
    assert "".join(f"{a.kind[0]}{a.microbatch}" for a in first) == "f0f1b0f2b1b2"
    assert "".join(f"{a.kind[0]}{a.microbatch}" for a in last) == "f0b0f1b1f2b2"


def test_fewer_microbatches_than_ranks() -> None:
    assert peak_live(order("1f1b", 4, 2)) == (2, 2, 2, 1)
    assert peak_live(order("gpipe", 4, 2)) == (2, 2, 2, 2)
    assert peak_live(order("zbv", 4, 2, 2)) == (2, 2, 2, 2, 2, 2, 2, 1)


def test_dualpipev_keeps_its_pairs() -> None:
    actions = order("dualpipev", 2, 4, 2)[0]
    place = next(index for index, action in enumerate(actions) if action.paired)
    assert actions[place : place + 2] == (Action(0, "forward", 3, True), Action(3, "backward", 1))


@pytest.mark.parametrize("schedule", schedule_names())
def test_default_virtual_stages_are_allowed(schedule: str) -> None:
    assert schedule_of(schedule).default_stages in schedule_of(schedule).stages_per_rank


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1f2b", 4, 8),
            r"schedule '1f2b' is unknown: use one of gpipe, 1f1b, .*pipedream_2bw, or a .csv file",
        ),
        (("1f1b", 0, 8), r"pp_size=0 is invalid: use a whole number of at least 1"),
        (("gpipe", 2, 0), r"num_microbatches=0 is invalid"),
        (
            ("1f1b", 4, 8, 2),
            r"virtual_stages=2 does not fit 1f1b: use 1 \(it keeps one stage per rank",
        ),
        (("zbv", 4, 8, 1), r"virtual_stages=1 does not fit zbv: use 2 "),
        (("dualpipev", 4, 8, 3), r"virtual_stages=3 does not fit dualpipev: use 2 "),
        (("interleaved1f1b", 4, 8, 1), r"use 2 or more \(with one stage per rank it is 1f1b\)"),
        (("looped_bfs", 4, 8, 1), r"use 2 or more \(with one stage per rank it is gpipe\)"),
        (
            ("interleaved1f1b", 4, 9, 2),
            r"num_microbatches=9 does not divide into 2 groups .*: use 8 or 10",
        ),
        (("interleaved_zero_bubble", 4, 13, 2), r"use 12 or 15"),
        (
            ("dualpipev", 4, 7, 2),
            r"num_microbatches=7 is too few for dualpipev over pp_size=4: use 8 or more",
        ),
        (
            ("pipedream_2bw", 4, 3),
            r"num_microbatches=3 is too few for pipedream_2bw over pp_size=4: use 4 or more",
        ),
        (("1f1b", 4, 8, 1, 2), r"steps=2: 1f1b ends every step with a flush"),
    ],
)
def test_refusals(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        order(*arguments)


def test_uneven_rounds_that_do_fit() -> None:
    assert simulate(order("interleaved1f1b", 4, 10, 2)).num_microbatches == 10
    assert simulate(order("interleaved_zero_bubble", 4, 3, 2)).num_microbatches == 3
