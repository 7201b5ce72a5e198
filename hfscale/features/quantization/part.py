"""Install quantized weights, after all others; they are never saved in 4 or 8 bits."""

from pathlib import Path

from ...errors import ConfigError
from ...plan.quantized import QuantizedPlan
from ...train.runtime import Part, Runtime
from ...train.runtime.shards import LocalWeights
from .quantized_modules import install_quantized, take_quantized


class Quantization(Part):
    """A part that installs quantized weights."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install the quantized weights, after all others."""
        if weights is not None:
            install_quantized(runtime.model, weights)

    def take_out(self, runtime: Runtime, weights: LocalWeights) -> None:
        """Move scales and bitsandbytes' parameters into ``weights``."""
        take_quantized(runtime.model, weights)


def refuse_quantized(quantized: QuantizedPlan | None, directory: Path) -> None:
    """Raise :class:`ConfigError` for weights in 4 or 8 bits: a checkpoint would keep their error for good."""
    if quantized is not None:
        raise ConfigError(
            f"the weights are in {quantized.bits} bits, and saving them to {str(directory)!r} would make their "
            "rounding error permanent: merge it into 16 bits first, with hfscale.merge_and_unload(model, "
            "dtype=torch.bfloat16), or train an adapter (load the model with peft_config=...), which save_pretrained "
            "writes by itself"
        )
