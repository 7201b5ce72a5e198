"""How many microbatches pipeline stages hold at once."""

from ..parallel.pipeline import Order, fullest_live, order, peak_live
from ..plan import Plan
from ..schedules import ASYNCHRONOUS


def microbatches_alive(plan: Plan, num_microbatches: int | None) -> tuple[int, ...]:
    """Per stage, the most microbatches that it holds at once; none where one rank holds all layers.

    Args:
        num_microbatches: of a step; by default the layout's, or as many as it has stages.
    """
    return () if plan.stages is None else peak_live(_order(plan, num_microbatches))


def alive_together(plan: Plan, num_microbatches: int | None) -> tuple[int, ...]:
    """Return, per stage, the microbatches alive when the stages of its rank together keep most.

    A stage alone may keep more at another time.
    """
    if plan.stages is None:
        return ()
    return fullest_live(_order(plan, num_microbatches), [max(1, len(stage.layers)) for stage in plan.stages.stages])


def _order(plan: Plan, num_microbatches: int | None) -> Order:
    layout = plan.layout
    count = num_microbatches or layout.num_microbatches or layout.pp
    schedule = str(layout.pipeline_schedule)
    steps = layout.pp if schedule in ASYNCHRONOUS else 1  # those of earlier steps are still under way
    return order(schedule, layout.pp, count, layout.virtual_stages or 1, steps)
