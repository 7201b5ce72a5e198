"""Describe pipeline schedules, and name other choices, without torch, so that the CLI can list them at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..extensions import added, provided

# How context ranks attend to each other's tokens.
CP_METHODS = (
    "auto",
    "gather",
    "heads",
    "ring",
    "heads_ring",
)

_ONE = range(1, 2)
_MANY = 1 << 16


def nothing_older(pp_size: int, rank: int) -> tuple[int, int]:
    """Return that a rank keeps no older weights, and one set of gradients."""
    return 0, 1


def fits_all(plan: Any, options: Any) -> None:
    """Accept every plan."""


@dataclass(frozen=True)
class Schedule:
    """Describe a pipeline schedule: which numbers it can run, and what it keeps of earlier steps."""

    stages_per_rank: range = _ONE
    default_stages: int = 1
    # The schedule that it is with one stage per rank.
    with_one_stage: str = ""
    # Stages go down the ranks and up again (Qi et al. 2023; DeepSeek 2025).
    v_shaped: bool = False
    # The fewest microbatches of a step, for each rank.
    microbatches_per_rank: int = 0
    # Microbatches divide into rounds of one size, at least one for each rank.
    in_rounds: bool = False
    # A step ends when all of its own microbatches have run backward, and its gradients are those of its own batch.
    flushes: bool = True
    order: Callable[[int, int, int], Any] | None = None
    """``(pp_size, num_microbatches, steps)`` -> the order of a schedule that has no row in
    :mod:`hfscale.parallel.pipeline.orders`."""
    kept: Callable[[int, int], tuple[int, int]] = nothing_older
    """``(pp_size, rank)`` -> older versions of the weights that a rank keeps, and sets of gradients."""
    check: Callable[[Any, Any], None] = fits_all
    """Refuse a :class:`~hfscale.plan.Plan` that the schedule cannot run with these ``Options``."""


_SCHEDULES = {
    "gpipe": Schedule(),
    "1f1b": Schedule(),
    "interleaved1f1b": Schedule(
        range(2, _MANY), default_stages=2, with_one_stage="1f1b", in_rounds=True
    ),
    "looped_bfs": Schedule(range(2, _MANY), default_stages=2, with_one_stage="gpipe"),
    "interleaved_zero_bubble": Schedule(range(1, _MANY), default_stages=2, in_rounds=True),
    "zbv": Schedule(range(2, 3), default_stages=2, v_shaped=True),
    "dualpipev": Schedule(range(2, 3), default_stages=2, v_shaped=True, microbatches_per_rank=2),
}
_OF_A_FILE = Schedule(range(1, _MANY))


def schedule_names() -> tuple[str, ...]:
    """Return the names of all schedules, those that extensions add last."""
    return (*_SCHEDULES, *added("schedules"))


def schedule_of(name: Any) -> Schedule:
    """Return what is known of a schedule by name; of a CSV file that it has stages as its layout says."""
    return _SCHEDULES.get(str(name)) or provided("schedules", str(name)) or _OF_A_FILE


def spelled(schedule: Any) -> Any:
    """Return a schedule's name in lower case, ``1F1B`` as ``1f1b``; return anything else unchanged."""
    known = isinstance(schedule, str) and schedule.lower() in schedule_names()
    return schedule.lower() if known else schedule


def gradient_compressions() -> tuple[str, ...]:
    """Return the names of the ways to compress gradients between replicas, those that extensions add last."""
    return ("no", "bf16", "fp16", *added("gradient_compressions"))
