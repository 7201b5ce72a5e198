"""Plan for attention that materializes its scores, as data."""

from dataclasses import dataclass

from .contents import Feature, PlanContents


@dataclass(frozen=True)
class ScoresPlan(Feature):
    """Plan of eager attention, which keeps a score for every head and pair of tokens."""

    heads: int  # query heads of a layer, over all tensor ranks

    def describe(self, plan: PlanContents) -> list[str]:
        """Return no lines: the memory estimate reports the scores."""
        return []


def heads_with_scores(plan: PlanContents) -> int:
    """Return how many heads keep scores; 0 for fused attention, and if sequences are cut over context ranks."""
    found = plan.feature(ScoresPlan)
    return 0 if found is None or plan.layout.cp > 1 else found.heads
