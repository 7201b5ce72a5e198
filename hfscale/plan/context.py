"""Plan how sequences are cut over context ranks, as data."""

from dataclasses import dataclass

from ..models.names import wild_name
from .contents import Feature, PlanContents


@dataclass(frozen=True)
class ContextPlan(Feature):
    """Plan of sequences cut over context ranks."""

    method: str  # one of :data:`hfscale.names.CP_METHODS`
    pads: bool  # whether rows may have padding; some families count positions, or chunks, from where it ends
    whole: tuple[str, ...] = ()  # modules besides attention that mix tokens; every rank runs them on full sequences
    # for ``heads_ring``, size of the groups of ranks that exchange tokens for heads; 1 for other methods
    together: int = 1
    # name of the text model of a multimodal model, at whose input sequences are cut; empty: batches are cut
    text: str = ""
    heads: int = 0  # query heads on one tensor rank; 0 where the config does not say
    key_heads: int = 0  # key/value heads on one tensor rank, likewise

    def describe(self, plan: PlanContents) -> list[str]:
        """Return the line about context parallelism in the plan's printout."""
        whole = ", ".join(dict.fromkeys(map(wild_name, self.whole)))
        mixers = f"; run on whole sequences by each: {whole}" if whole else ""
        padding = "" if self.pads else "; rows without padding only"
        inside = f"; cut where {self.text} begins, which each makes whole" if self.text else ""
        return [
            f"sequences: each of {plan.layout.cp} ranks has an early and a late piece of every sequence, and "
            f"attention reads the others' ({self.method}){inside}{mixers}{padding}"
        ]
