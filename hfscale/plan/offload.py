"""What of a run lies on the host beside its device, as data."""

from dataclasses import dataclass

from ..errors import ConfigError
from .contents import Feature, PlanContents


@dataclass(frozen=True)
class OffloadPlan(Feature):
    """What lies on the host.

    Attributes:
        optimizer: the optimizer's state, which is stepped there.
        parameters: this rank's shards of parameters, and of their gradients, which are stepped there.
        activations: what layers keep for their backward pass, in tensors of so many bytes or more; ``None``: nothing.
    """

    optimizer: bool = False
    parameters: bool = False
    activations: int | None = None

    def describe(self, plan: PlanContents) -> list[str]:
        """What is there."""
        what = ["the optimizer's state"] if self.optimizer else []
        what += ["shards of parameters and gradients"] if self.parameters else []
        if self.activations is not None:
            what.append(f"what layers keep for the backward pass, in tensors of {self.activations:,} bytes and more")
        return [f"on the host: {', '.join(what)}"]


def offloaded(plan: PlanContents) -> OffloadPlan:
    """What a plan says of it; an empty one where nothing was asked."""
    return plan.feature(OffloadPlan) or OffloadPlan()


def refuse_aside(name: str, asked: str = "offload_optimizer=True") -> None:
    """Refuse an optimizer that cannot step copies of single weights, which ``asked`` needs.

    Raises:
        ConfigError: it looks at whole matrices.
    """
    if name in ("adafactor", "muon"):
        raise ConfigError(
            f"{asked} steps copies of weights by the optimizers of torch and bitsandbytes, and {name!r} is another: "
            "use 'adamw_torch' or 'adamw_8bit'"
        )
