"""What is planned about sequences that are cut over context ranks."""

from dataclasses import dataclass

from .contents import Feature, PlanContents
from .parameter import wild_name


@dataclass(frozen=True)
class ContextPlan(Feature):
    """How sequences are cut over context ranks.

    Attributes:
        method: one of :data:`hfscale.names.CP_METHODS`.
        pads: whether rows may have padding; some families count positions, or chunks, from where it ends.
        whole: modules besides attention that mix tokens, which every rank runs on whole sequences.
        together: for ``heads_ring``, how many ranks share out heads between them; 1 for other methods.
        text: name of the model of text where sequences are cut, in a model of more; empty: where batches enter.
        heads: of queries, on one tensor rank; 0 where the config does not say.
        key_heads: of keys and values, likewise.
    """

    method: str
    pads: bool
    whole: tuple[str, ...] = ()
    together: int = 1
    text: str = ""
    heads: int = 0
    key_heads: int = 0

    def describe(self, plan: PlanContents) -> list[str]:
        """How attention reads the tokens of other ranks."""
        whole = ", ".join(dict.fromkeys(map(wild_name, self.whole)))
        mixers = f"; run on whole sequences by each: {whole}" if whole else ""
        padding = "" if self.pads else "; rows without padding only"
        inside = f"; cut where {self.text} begins, which each makes whole" if self.text else ""
        return [
            f"sequences: each of {plan.layout.size('cp')} ranks has an early and a late piece of every sequence, and "
            f"attention reads the others' ({self.method}){inside}{mixers}{padding}"
        ]
