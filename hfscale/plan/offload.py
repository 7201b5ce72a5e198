"""Plan offload to the CPU, as data."""

from dataclasses import dataclass

from ..errors import ConfigError
from .contents import Feature, PlanContents


@dataclass(frozen=True)
class OffloadPlan(Feature):
    """Plan of tensors that are offloaded to the CPU."""

    optimizer: bool = False  # the optimizer's state; updates of it run on the CPU
    parameters: bool = False  # this rank's shards of parameters and of their gradients; updates of them run on the CPU
    # bytes of the smallest activation that is offloaded until its backward pass; ``None``: none are
    activations: int | None = None

    def describe(self, plan: PlanContents) -> list[str]:
        """Return the line about offloading in the plan's printout."""
        what = ["the optimizer's state"] if self.optimizer else []
        what += ["shards of parameters and gradients"] if self.parameters else []
        if self.activations is not None:
            what.append(f"what layers keep for the backward pass, in tensors of {self.activations:,} bytes and more")
        return [f"on the host: {', '.join(what)}"]


def offloaded(plan: PlanContents) -> OffloadPlan:
    """Return what the plan offloads; an empty :class:`OffloadPlan` if nothing."""
    return plan.feature(OffloadPlan) or OffloadPlan()


def refuse_aside(name: str, asked: str = "offload_optimizer=True") -> None:
    """Refuse an optimizer that cannot update copies of single weights, as ``asked`` requires."""
    if name in ("adafactor", "muon"):
        raise ConfigError(
            f"{asked} needs an optimizer of torch or bitsandbytes, which can step copies of weights, got {name!r}: "
            "use 'adamw_torch' or 'adamw_8bit'"
        )
