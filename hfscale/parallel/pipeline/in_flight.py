"""Count the microbatches in flight per pipeline stage: forward pass done, backward pass not complete."""

from functools import cache

from ...config.schedules import ASYNCHRONOUS
from ...plan import Plan
from .orders import order
from .timeline import Order, fullest_live, peak_live


def most_in_flight(plan: Plan, num_microbatches: int | None) -> tuple[int, ...]:
    """Return, per stage, the most microbatches that it holds at once; empty where one rank holds all layers."""
    return () if plan.stages is None else peak_live(_order(plan, num_microbatches))


def in_flight_together(plan: Plan, num_microbatches: int | None) -> tuple[int, ...]:
    """Return, per stage, microbatches in flight when its rank's stages together keep most (one alone may keep more)."""
    if plan.stages is None:
        return ()
    return fullest_live(_order(plan, num_microbatches), [max(1, len(stage.layers)) for stage in plan.stages.stages])


@cache
def in_flight_of_ranks(schedule: str, pp_size: int, num_microbatches: int, virtual_stages: int) -> tuple[int, ...]:
    """Return, per rank, the most microbatches that its stages, of equal size, hold; of a step, ``2 pp_size`` count."""
    played = order(schedule, pp_size, min(num_microbatches, 2 * pp_size), virtual_stages)
    live = fullest_live(played, [1] * (pp_size * virtual_stages))
    return tuple(sum(live[stage] for stage in {action.stage for action in actions}) for actions in played)


def _order(plan: Plan, num_microbatches: int | None) -> Order:
    layout = plan.layout
    count = num_microbatches or layout.num_microbatches or layout.pp
    schedule = str(layout.pipeline_schedule)
    steps = layout.pp if schedule in ASYNCHRONOUS else 1  # those of earlier steps are still under way
    return order(schedule, layout.pp, count, layout.virtual_stages or 1, steps)
