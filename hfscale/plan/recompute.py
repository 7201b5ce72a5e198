"""What of a model is computed again in the backward pass, as data."""

from dataclasses import dataclass

from .contents import Feature, PlanContents
from .parameter import wild_name


@dataclass(frozen=True)
class RecomputePlan(Feature):
    """What the backward pass computes again instead of keeping it. Names are full module names.

    Attributes:
        layers: layers of which the input alone is kept; under a budget, those that may be chosen.
        modules: modules in the layers that are computed again by themselves.
        attention: whether what is between queries, keys, values and the output projection is.
        keep: operators of those ``layers`` whose results are kept.
        budget: bytes that the layers of a rank may keep; ``None``: all ``layers`` are recomputed.
        tokens: of one microbatch, that the budget is for; ``None``: of the largest one in the first step.
    """

    layers: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    attention: bool = False
    keep: tuple[str, ...] = ()
    budget: int | None = None
    tokens: int | None = None

    def is_alone(self, module: str) -> bool:
        """Whether a module is recomputed without the rest of its layer, by itself or in another one."""
        return any(f"{module}.".startswith(f"{name}.") for name in self.modules)

    @property
    def recomputes_weights(self) -> bool:
        """Whether products with weights are among it."""
        return bool(self.layers or self.modules)

    def describe(self, plan: PlanContents) -> list[str]:
        """What is computed again."""
        again = ["attention between its projections"] if self.attention else []
        again += [f"{len(self.layers)} of {len(plan.layers)} layers"] if self.layers and self.budget is None else []
        if self.budget is not None:
            again.append(f"as few layers as bring what layers keep below {self.budget:,} bytes on a rank")
        names = [wild_name(name) for name in self.modules]
        again += [f"{name} x{names.count(name)}" for name in dict.fromkeys(names)]
        kept = f"; results of {', '.join(self.keep)} are kept" if self.keep else ""
        return [f"computed again in the backward pass: {', '.join(again)}{kept}"]


def recomputed(plan: PlanContents) -> RecomputePlan:
    """What a plan says of it; an empty one where nothing was asked."""
    return plan.feature(RecomputePlan) or RecomputePlan()
