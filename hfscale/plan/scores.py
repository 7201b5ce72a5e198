"""Attention that keeps its scores, as data."""

from dataclasses import dataclass

from .contents import Feature, PlanContents


@dataclass(frozen=True)
class ScoresPlan(Feature):
    """Attention is eager: it keeps a score for every head and pair of tokens.

    Attributes:
        heads: of queries in a layer, over all tensor ranks.
    """

    heads: int

    def describe(self, plan: PlanContents) -> list[str]:
        """Nothing: the memory estimate says it."""
        return []


def heads_with_scores(plan: PlanContents) -> int:
    """Return how many heads keep scores; 0 for fused attention, and where sequences are cut over context ranks."""
    found = plan.feature(ScoresPlan)
    return 0 if found is None or plan.layout.size("cp") > 1 else found.heads
