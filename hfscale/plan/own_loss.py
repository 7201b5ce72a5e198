"""What is planned about a loss that a model takes itself."""

from dataclasses import dataclass

from .contents import Feature, PlanContents


@dataclass(frozen=True)
class OwnLossPlan(Feature):
    """A loss of the model's own that is a mean: over rows, or over the labels that are not ignored.

    Attributes:
        over: ``"rows"`` or ``"labels"``.
        divides: whether it is divided by ``num_items_in_batch``, where that is given.
    """

    over: str
    divides: bool = False

    def describe(self, plan: PlanContents) -> list[str]:
        """How microbatches of a step are weighted."""
        return [f"loss: the model's own, a mean over {self.over}; microbatches count by their {self.over}"]
