"""What of a run lies on the host beside its device, as data."""

from dataclasses import dataclass

from .contents import Feature, PlanContents


@dataclass(frozen=True)
class OffloadPlan(Feature):
    """What lies on the host.

    Attributes:
        optimizer: the optimizer's state, which is stepped there.
    """

    optimizer: bool = False

    def describe(self, plan: PlanContents) -> list[str]:
        """What is there."""
        what = ["the optimizer's state"] if self.optimizer else []
        return [f"on the host: {', '.join(what)}"]


def offloaded(plan: PlanContents) -> OffloadPlan:
    """What a plan says of it; an empty one where nothing was asked."""
    return plan.feature(OffloadPlan) or OffloadPlan()
