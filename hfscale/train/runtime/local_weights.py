"""Hold one rank's weights between loading, or removal from the model, and installation into it."""

from dataclasses import dataclass, field

from torch import Tensor, nn

from ...plan import Plan


@dataclass
class LocalWeights:
    """Hold this rank's shards of all weights.

    Attributes:
        tensors: by owned name.
        quantized: the additional tensors of quantized weights: module, parameter name, and this rank's shard; or the
            parameter itself, if it is of a bitsandbytes class.
        plan: the plan that the loaded checkpoint has made exact.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    quantized: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    plan: Plan | None = None

    def copy(self) -> "LocalWeights":
        """Return a shallow copy: the same tensors in new containers."""
        return LocalWeights(dict(self.tensors), list(self.quantized))
