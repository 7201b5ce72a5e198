"""Plan which saved activations are kept in 8 bits, as data."""

from dataclasses import dataclass

from .contents import Feature, PlanContents

BLOCK = 256
"""Entries per scale."""
BYTES = 1 + 4 / BLOCK
"""Bytes per entry, including its fraction of the scale."""
FEW = 16
"""Tensors smaller than the layer's input by this factor stay exact: log-sum-exps and statistics of norms, by which
everything else is divided, rotary tables, router logits."""


@dataclass(frozen=True)
class CompressPlan(Feature):
    """Plan of activations that are saved for the backward pass in 8 bits."""

    least: int  # bytes of the smallest tensor that is compressed

    def describe(self, plan: PlanContents) -> list[str]:
        """Return the line about compressed activations in the plan's printout."""
        return [f"in 8 bits: what layers keep for the backward pass, in tensors of {self.least:,} bytes and more"]


def compressed(plan: PlanContents) -> int | None:
    """Return the bytes of the smallest activation saved in 8 bits, or ``None`` if activations are saved as they are."""
    found = plan.feature(CompressPlan)
    return None if found is None else found.least
