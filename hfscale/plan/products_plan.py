"""Plan which matrix products run in 8 bits, as data."""

from dataclasses import dataclass

from ..models.names import wild_name
from .contents import Feature, PlanContents

_READS = "lora_magnitude_vector"  # DoRA's, of the norms of the weight's rows


@dataclass(frozen=True)
class ProductsPlan(Feature):
    """Plan of projections whose products are in 8 bits. Names are full module names.

    Attributes:
        modules: the projections.
        rowwise: a scale for each row; else one for each tensor.
        left_out: projections of the layers that stay as they are, each with why, in words.
        gathers: whether data ranks all-gather these weights in 8 bits.
    """

    modules: tuple[str, ...]
    rowwise: bool = False
    left_out: tuple[tuple[str, str], ...] = ()
    gathers: bool = False

    def describe(self, plan: PlanContents) -> list[str]:
        """Return the lines about products in 8 bits, and projections left out of them, in the plan's printout."""
        what = "rows" if self.rowwise else "tensors"
        lines = [f"products in 8 bits, scaled by {what}: {_counted(list(self.modules))}"]
        if gathered := gathered_in_8_bits(plan):
            others = ", but for those whose adapters read the weight" if len(gathered) < len(self.modules) else ""
            lines.append(f"data ranks gather their weights in 8 bits{others}")
        for why in dict.fromkeys(why for _, why in self.left_out):
            lines.append(f"not in 8 bits ({why}): {_counted([name for name, one in self.left_out if one == why])}")
        return lines


def _counted(names: list[str]) -> str:
    wild = [wild_name(name) for name in names]
    return ", ".join(f"{name} x{wild.count(name)}" for name in dict.fromkeys(wild))


def weights_in_8_bits(plan: PlanContents) -> frozenset[str]:
    """Return the names of the parameters whose products are in 8 bits."""
    found = plan.feature(ProductsPlan)
    return frozenset() if found is None else frozenset(f"{name}.weight" for name in found.modules)


def gathered_in_8_bits(plan: PlanContents) -> frozenset[str]:
    """Return the names of the parameters that data ranks all-gather in 8 bits.

    Weights that something else reads in full precision are not among them: DoRA takes the norms of a weight's rows.
    """
    found = plan.feature(ProductsPlan)
    if found is None or not found.gathers or plan.layout.dp_shard == 1:
        return frozenset()
    return weights_in_8_bits(plan) - {adapter.base for adapter in plan.adapters if adapter.kept_in == _READS}
