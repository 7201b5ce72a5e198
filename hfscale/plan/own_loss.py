"""Plan how a loss that the model computes itself is averaged."""

from dataclasses import dataclass

from .contents import Feature, PlanContents


@dataclass(frozen=True)
class OwnLossPlan(Feature):
    """Plan of a loss computed by the model itself, as a mean over rows or over the labels that are not ignored."""

    over: str  # ``"rows"`` or ``"labels"``
    divides: bool = False  # whether it is divided by ``num_items_in_batch``, if that is passed

    def describe(self, plan: PlanContents) -> list[str]:
        """Return the line about the weights of microbatches in the plan's printout."""
        return [f"loss: the model's own, a mean over {self.over}; microbatches count by their {self.over}"]
