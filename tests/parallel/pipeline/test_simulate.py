"""Simulated schedules against the papers' formulas, exactly."""

import pytest

from hfscale.errors import ConfigError
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.simulation import Costs, simulate
from hfscale.parallel.pipeline.timeline import Action, peak_live

from .formulas import ideal_bubble, peak_formula

GRID = [(p, factor * p) for p in (2, 3, 4, 8) for factor in (1, 2, 4)]
EQUAL = Costs(forward=1.0, backward=2.0, backward_input=1.0, backward_weight=1.0)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved1f1b", 2),
        ("interleaved1f1b", 4),
        ("looped_bfs", 2),
        ("looped_bfs", 4),
        ("interleaved_zero_bubble", 1),
        ("interleaved_zero_bubble", 2),
        ("interleaved_zero_bubble", 4),
        ("zbv", 2),
        ("dualpipev", 2),
        ("pipedream", 1),
        ("pipedream_2bw", 1),
    ],
)
def test_bubble_and_peak_are_the_formulas(schedule: str, virtual: int) -> None:
    tested = 0
    for p, m in GRID:
        expected = None
        if schedule != "dualpipev" or m >= 2 * p:
            expected = ideal_bubble(schedule, p, m, virtual, EQUAL)
        if expected is None:
            continue
        tested += 1
        timeline = simulate(order(schedule, p, m, virtual), EQUAL)
        assert timeline.work == 3 * m * virtual
        bubble = timeline.span_bubble if schedule == "zbv" else timeline.bubble
        assert bubble == pytest.approx(expected, abs=1e-12), (p, m)
        peak = peak_formula(schedule, p, m, virtual)
        if peak is not None:
            assert timeline.peak_live() == peak, (p, m)
    assert tested >= 8


def test_the_formulas_in_numbers() -> None:
    assert ideal_bubble("gpipe", 4, 8) == ideal_bubble("1f1b", 4, 8) == 3 / 8
    assert ideal_bubble("interleaved1f1b", 4, 8, 2) == ideal_bubble("looped_bfs", 4, 8, 2) == 3 / 16
    # A third of 1F1B's where F = I = W.
    assert ideal_bubble("interleaved_zero_bubble", 4, 8, 1) == 1 / 8
    assert ideal_bubble("zbv", 4, 8, 2) == 0
    assert ideal_bubble("zbv", 4, 4, 2) is None  # fewer than 2p - 1 microbatches
    assert ideal_bubble("dualpipev", 4, 8, 2) == 3 * 2 / 48
    assert ideal_bubble("dualpipev", 4, 8, 2, Costs(pair=2.0)) == 3 * 1 / 48  # F&B + B - 3W
    with pytest.raises(ConfigError, match="no formula"):
        ideal_bubble("mine.csv", 4, 8)


def test_zero_bubble_with_other_durations() -> None:
    costs = Costs(forward=1.0, backward=1.9, backward_input=1.3, backward_weight=0.6)
    timeline = simulate(order("interleaved_zero_bubble", 4, 16, 1), costs)
    assert timeline.bubble == pytest.approx(
        ideal_bubble("interleaved_zero_bubble", 4, 16, 1, costs)
    )


def test_zbv_begins_and_ends_staggered() -> None:
    timeline = simulate(order("zbv", 4, 8, 2), EQUAL)
    assert timeline.makespan == timeline.longest_span + 3  # (p - 1) forwards
    assert [spans[0].start for spans in timeline.ranks] == [0, 1, 2, 3]


def test_asynchronous_ones_do_not_wait_once_filled() -> None:
    for schedule, m, steps in (("pipedream", 24, 1), ("pipedream_2bw", 8, 3)):
        timeline = simulate(order(schedule, 4, m, steps=steps), EQUAL, schedule, m)
        assert timeline.steady_idle == pytest.approx(0)
        assert timeline.bubble == pytest.approx(3 / 24)
        assert timeline.num_microbatches == m
    flushed = simulate(order("1f1b", 4, 8), EQUAL)
    assert flushed.bubble == 3 / 8
    assert simulate(order("1f1b", 4, 4), EQUAL).steady_idle is None


def test_communication_is_waited_for() -> None:
    costs = Costs(communication=0.25)
    assert simulate(order("gpipe", 3, 1), costs).makespan == 3 * 3 + 4 * 0.25
    # down the ranks and up, there and back: four crossings; the turns of the V stay on a rank and cost nothing
    there_and_back = order("zbv", 2, 1, 2)
    assert simulate(there_and_back, costs).makespan == simulate(there_and_back).makespan + 4 * 0.25


def test_a_pair_sends_when_both_are_done() -> None:
    paired = (
        (Action(0, "forward", 0), Action(0, "forward", 1, True), Action(0, "backward", 0)),
        (),
    )
    later = (Action(1, "forward", 0), Action(1, "backward", 0), Action(1, "forward", 1))
    timeline = simulate((paired[0], later))
    first, second = timeline.ranks[0][1:]
    assert (first.start, second.start, second.end) == (1, 4, 6)
    assert timeline.ranks[1][2].start == 6
    shorter = simulate((paired[0], later), Costs(pair=1.5))
    assert shorter.ranks[1][2].start == 5


def test_a_deadlock_is_said() -> None:
    with pytest.raises(
        ConfigError, match=r"this order would deadlock.*rank 0 at backward of stage 0, microbatch 0"
    ):
        simulate(((Action(0, "backward", 0), Action(0, "forward", 0)),))


def test_idle_and_peaks_of_a_bare_order() -> None:
    timeline = simulate(order("1f1b", 4, 8))
    assert timeline.idle == pytest.approx(9 / 33)  # (p - 1) / (m + p - 1)
    assert peak_live(order("1f1b", 4, 8)) == timeline.peak_live() == (4, 3, 2, 1)
    assert (timeline.num_ranks, timeline.num_stages, timeline.virtual_stages) == (4, 4, 1)
