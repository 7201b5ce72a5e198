"""What layers keep in 8 bits, as data."""

from dataclasses import dataclass

from .contents import Feature, PlanContents

BLOCK = 256
"""Entries that share a scale."""
BYTES = 1 + 4 / BLOCK
"""Of one entry, its part of the scale included."""
FEW = 16
"""What has less than the layer's input by this factor stays exact: logarithms of sums and statistics of norms, which
everything else is divided by, rotary tables, logits of routers."""


@dataclass(frozen=True)
class CompressPlan(Feature):
    """What layers keep for their backward pass is kept in 8 bits.

    Attributes:
        least: bytes of the smallest tensor that is.
    """

    least: int

    def describe(self, plan: PlanContents) -> list[str]:
        """What it is."""
        return [f"in 8 bits: what layers keep for the backward pass, in tensors of {self.least:,} bytes and more"]


def compressed(plan: PlanContents) -> int | None:
    """Bytes of the smallest tensor that layers keep in 8 bits; ``None``: they keep them as they are."""
    found = plan.feature(CompressPlan)
    return None if found is None else found.least
