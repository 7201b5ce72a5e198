"""Describe pipeline schedules, and list the accepted names of other options, without importing torch, so that the
command line starts quickly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..extensions import added, provided

# Methods by which context ranks attend to each other's tokens.
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
    """Return the numbers of older versions of the weights (0) and of sets of gradients (1) that a rank keeps, for
    schedules in which all microbatches of a step use the same weights.
    """
    return 0, 1


def fits_all(plan: Any, options: Any) -> None:
    """Do nothing: the check of a schedule that supports every plan and all options."""


@dataclass(frozen=True)
class Schedule:
    """Describe a pipeline schedule: the numbers of stages and microbatches that it supports, and how many older
    versions of the weights a rank keeps.
    """

    stages_per_rank: range = _ONE  # supported numbers of stages per rank
    default_stages: int = 1  # stages per rank if the user gives no number
    # name of the schedule that this schedule equals if each rank has one stage; empty: none
    with_one_stage: str = ""
    # whether stages are placed on ascending, then on descending ranks (Qi et al. 2023; DeepSeek 2025)
    v_shaped: bool = False
    # the minimum number of microbatches of a step, per rank
    microbatches_per_rank: int = 0
    # whether the microbatches of a step must divide into rounds of equal size, with at least one microbatch per rank
    # each
    in_rounds: bool = False
    # whether a step ends after the backward passes of all its own microbatches, so that its gradients are those of its
    # own batch
    flushes: bool = True
    order: Callable[[int, int, int], Any] | None = None
    """Function ``(pp_size, num_microbatches, steps)`` that returns the order of the forward and backward passes;
    ``None`` for schedules whose order :mod:`hfscale.parallel.pipeline.orders` defines.
    """
    kept: Callable[[int, int], tuple[int, int]] = nothing_older
    """Function ``(pp_size, rank)`` that returns how many older versions of the weights, and how many sets of gradients,
    a pipeline rank keeps.
    """
    check: Callable[[Any, Any], None] = fits_all
    """Function that raises an error for a :class:`~hfscale.plan.Plan` and ``Options`` that the schedule does not
    support.
    """


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
    """Return the names of all schedules; schedules of extensions come last."""
    return (*_SCHEDULES, *added("schedules"))


def schedule_of(name: Any) -> Schedule:
    """Return the description of the schedule ``name``. If no schedule has this name, it is a CSV file, for which any
    number of stages per rank is allowed.
    """
    return _SCHEDULES.get(str(name)) or provided("schedules", str(name)) or _OF_A_FILE


def spelled(schedule: Any) -> Any:
    """Return ``schedule`` in lower case if it is the name of a schedule (``1F1B`` -> ``1f1b``), otherwise unchanged."""
    known = isinstance(schedule, str) and schedule.lower() in schedule_names()
    return schedule.lower() if known else schedule


def gradient_compressions() -> tuple[str, ...]:
    """Return the names of the methods that compress gradients between replicas; methods of extensions come last."""
    return ("no", "bf16", "fp16", *added("gradient_compressions"))
