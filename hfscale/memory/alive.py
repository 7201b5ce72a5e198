"""How many microbatches pipeline stages hold at once."""

from ..parallel.pipeline import order, peak_live
from ..plan import Plan


def microbatches_alive(plan: Plan, num_microbatches: int | None) -> tuple[int, ...]:
    """Per stage, the most microbatches that it holds at once; none where one rank holds all layers.

    Args:
        num_microbatches: of a step; by default the layout's, or as many as it has stages.
    """
    layout = plan.layout
    if plan.stages is None:
        return ()
    count = num_microbatches or layout.num_microbatches or layout.size("pp")
    return peak_live(order(str(layout.pipeline_schedule), layout.size("pp"), count, layout.virtual_stages or 1))
