"""What one rank holds of a model's weights, between being loaded, or taken out of the model, and being put into it."""

from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass
class LocalWeights:
    """This rank's final shares.

    Attributes:
        tensors: by owned name.
        quantized: what belongs to quantized weights besides: module, parameter, and its share; or the parameter itself,
            where it is of a class of bitsandbytes.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    quantized: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)

    def copy(self) -> "LocalWeights":
        """The same tensors, to be added to and taken from without changing these."""
        return LocalWeights(dict(self.tensors), list(self.quantized))
