"""Schedules where every communicator carries one tensor after another: no deadlock, and no time lost by it."""

import pytest

from hfscale.config.schedules import schedule_names, schedule_of
from hfscale.errors import ConfigError
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.simulation import Costs, simulate
from hfscale.parallel.pipeline.timeline import Action

from . import communicators
from .communicators import simulate_communicators
from .formulas import ideal_bubble

# Of a forward pass of a rank: 8 MiB where it takes 4 ms and a link carries 100 GB/s.
TRANSFER = 0.02


def _costs(virtual: int, transfer: float = TRANSFER) -> Costs:
    """Those of a stage; of a whole rank, a forward pass takes 1 and a backward pass 2."""
    f = 1 / virtual
    return Costs(
        forward=f, backward=2 * f, backward_input=f, backward_weight=f, communication=transfer
    )


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("schedule", schedule_names())
def test_no_communicator_holds_up_another(schedule: str, p: int) -> None:
    virtual = schedule_of(schedule).default_stages
    for m in (p, 2 * p, 4 * p):
        if schedule == "dualpipev" and m < 2 * p:
            continue
        actions = order(
            schedule, p, m, virtual, steps=2 if not schedule_of(schedule).flushes else 1
        )
        ideal = simulate(actions, _costs(virtual, 0.0)).makespan
        bubble = ideal_bubble(schedule, p, m, virtual, _costs(virtual))
        # Whose formula is not of the whole span.
        if bubble is not None and schedule not in (
            "zbv",
            "pipedream",
            "pipedream_2bw",
        ):
            assert ideal == pytest.approx(3 * m * (1 + bubble))
        found = simulate_communicators(actions, _costs(virtual, 0.0))
        assert found.makespan == pytest.approx(ideal, rel=0.03), m
        assert [[span.action for span in spans] for spans in found.ranks] == [
            [action._replace(paired=False) for action in row] for row in actions
        ]
        # A link of its own for every transfer is the least that they take.
        apart = simulate(actions, _costs(virtual)).makespan
        assert simulate_communicators(actions, _costs(virtual)).makespan <= 1.03 * apart, m
        if schedule_of(schedule).flushes:  # an evaluation runs the forward passes only
            forward = tuple(
                tuple(a._replace(paired=False) for a in row if a.kind == "forward")
                for row in actions
            )
            simulate_communicators(forward, _costs(virtual))


@pytest.mark.parametrize(
    ("schedule", "virtual", "makespan"),
    [
        ("1f1b", 1, 118.4),
        ("interleaved1f1b", 2, 107.1),
        ("looped_bfs", 2, 109.3),
        ("interleaved_zero_bubble", 2, 100.4),
        ("zbv", 2, 100.2),
        ("dualpipev", 2, 104.4),
    ],
)
def test_what_schedules_cost_with_a_communicator_per_way(
    schedule: str, virtual: int, makespan: float
) -> None:
    found = simulate_communicators(order(schedule, 8, 32, virtual), _costs(virtual))
    assert found.makespan == pytest.approx(makespan, abs=0.06)


def test_a_deadlock_of_transfers_is_said() -> None:
    """Stage 1 takes the microbatches the other way round: each rank waits for the other's second one."""
    first = (Action(0, "forward", 0), Action(0, "forward", 1))
    order_of = (first, (Action(1, "forward", 1), Action(1, "forward", 0)))
    # Programs ask for both where they are sent.
    assert simulate_communicators(order_of).makespan == 4.0
    crossed = [[("SEND_F", 0, 0), ("SEND_F", 0, 1)], [("RECV_F", 1, 1), ("RECV_F", 1, 0)]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "rank_programs", lambda _: crossed)
        with pytest.raises(
            ConfigError, match="mine would deadlock: its transfers wait for each other"
        ):
            simulate_communicators(order_of, name="mine")
