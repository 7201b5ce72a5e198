"""Plan activation checkpointing, as data."""

from dataclasses import dataclass

from ..models.names import wild_name
from .contents import Feature, PlanContents


@dataclass(frozen=True)
class RecomputePlan(Feature):
    """Plan of modules whose forward pass runs again in the backward pass. Names are full module names."""

    layers: tuple[str, ...] = ()  # recomputed layers, of which only the input is kept; under a budget, the candidates
    modules: tuple[str, ...] = ()  # modules in the layers that are recomputed by themselves
    attention: bool = False  # whether attention is recomputed between its query, key, value and output projections
    keep: tuple[str, ...] = ()  # operators in ``layers`` whose results are kept (selective checkpointing)
    budget: int | None = None  # bytes that the layers of a rank may keep; ``None``: all ``layers`` are recomputed
    # tokens of the microbatch that the budget holds for; ``None``: of the largest one in the first step
    tokens: int | None = None

    def is_alone(self, module: str) -> bool:
        """Return whether a module is recomputed without the rest of its layer, alone or inside another module."""
        return any(f"{module}.".startswith(f"{name}.") for name in self.modules)

    @property
    def recomputes_weights(self) -> bool:
        """Return whether products with weights are recomputed."""
        return bool(self.layers or self.modules)

    def describe(self, plan: PlanContents) -> list[str]:
        """Return the line about recomputation in the plan's printout."""
        again = ["attention between its projections"] if self.attention else []
        again += [f"{len(self.layers)} of {len(plan.layers)} layers"] if self.layers and self.budget is None else []
        if self.budget is not None:
            again.append(f"as few layers as bring what layers keep below {self.budget:,} bytes on a rank")
        names = [wild_name(name) for name in self.modules]
        again += [f"{name} x{names.count(name)}" for name in dict.fromkeys(names)]
        kept = f"; results of {', '.join(self.keep)} are kept" if self.keep else ""
        return [f"computed again in the backward pass: {', '.join(again)}{kept}"]


def recomputed(plan: PlanContents) -> RecomputePlan:
    """Return what the plan recomputes; an empty :class:`RecomputePlan` if nothing."""
    return plan.feature(RecomputePlan) or RecomputePlan()
