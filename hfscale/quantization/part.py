"""Quantized weights as a part: they are put into the model last, and are never saved as they are."""

from pathlib import Path

from ..errors import ConfigError
from ..runtime import Part, Runtime
from ..runtime.local_weights import LocalWeights
from .quantized_modules import install_quantized, take_quantized


class Quantization(Part):
    """Nothing where no weights are quantized."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Comes behind all other weights."""
        if weights is not None:
            install_quantized(weights)

    def take_out(self, runtime: Runtime, weights: LocalWeights) -> None:
        """Scales, and parameters of bitsandbytes' classes."""
        take_quantized(runtime.model, weights)

    def save(self, runtime: Runtime, directory: Path) -> bool:
        """Refuse: the error of the bits would be kept for good."""
        quantized = runtime.plan.quantized
        if quantized is None:
            return False
        raise ConfigError(
            f"the model is held in {quantized.bits} bits, and {str(directory)!r} would keep their error for "
            "good: merge it into 16 bits first, with hfscale.merge_and_unload(model, dtype=torch.bfloat16), or train "
            "an adapter (load the model with peft_config=...), which save_pretrained writes by itself"
        )
