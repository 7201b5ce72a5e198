"""What is multiplied in 8 bits, as data."""

from dataclasses import dataclass

from .contents import Feature, PlanContents
from .parameter import wild_name


@dataclass(frozen=True)
class Float8Plan(Feature):
    """Projections whose products are in 8 bits. Names are full module names.

    Attributes:
        modules: the projections.
        rowwise: a scale for each row; else one for each tensor.
        left_out: projections of the layers that stay as they are, each with why, in words.
    """

    modules: tuple[str, ...]
    rowwise: bool = False
    left_out: tuple[tuple[str, str], ...] = ()

    def describe(self, plan: PlanContents) -> list[str]:
        """What is, and what is not."""
        what = "rows" if self.rowwise else "tensors"
        lines = [f"products in 8 bits, scaled by {what}: {_counted(list(self.modules))}"]
        for why in dict.fromkeys(why for _, why in self.left_out):
            lines.append(f"not in 8 bits ({why}): {_counted([name for name, one in self.left_out if one == why])}")
        return lines


def _counted(names: list[str]) -> str:
    wild = [wild_name(name) for name in names]
    return ", ".join(f"{name} x{wild.count(name)}" for name in dict.fromkeys(wild))


def float8_weights(plan: PlanContents) -> frozenset[str]:
    """Parameters whose products are in 8 bits."""
    found = plan.feature(Float8Plan)
    return frozenset() if found is None else frozenset(f"{name}.weight" for name in found.modules)
