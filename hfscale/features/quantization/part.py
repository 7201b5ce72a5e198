"""Install quantized weights into the model after all other weights. They are never saved in 4 or 8 bits."""

from pathlib import Path
from typing import Any

from torch import nn

from ..._compat.bitsandbytes import is_stock_parameter
from ..._compat.torch import own_parameters
from ...distributed.ops.quantized_weights import encodings_of, mark, register_quantized
from ...errors import ConfigError
from ...plan.quantized import QuantizedPlan
from ...train.runtime import Part, Runtime, like_sharded, local_tensor
from ...train.runtime.shards import LocalWeights
from .quantized_modules import ROWS


class Quantization(Part):
    """Install quantized weights into the model's modules."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Set scales and bitsandbytes' parameters in their modules, after all other weights and after FSDP2."""
        if weights is None:
            return
        for module in runtime.model.modules():
            mark(module)
        for module, name, share in weights.quantized:
            # A parameter of bitsandbytes' own class holds its scales itself.
            if isinstance(share, nn.Parameter):
                own_parameters(module)[name] = share
                continue
            empty: Any = own_parameters(module)[name]
            own_parameters(module)[name] = nn.Parameter(
                like_sharded(share, empty), requires_grad=False
            )

    def take_out(self, runtime: Runtime, weights: LocalWeights) -> None:
        """Undo :meth:`install`, after FSDP2 is undone: move scales and bitsandbytes' parameters into ``weights``."""
        for module in runtime.model.modules():
            for name, encoding in list(encodings_of(module).items()):
                register_quantized(module, name, encoding)
            parameter = own_parameters(module).get("weight")
            if type(module).__name__ == ROWS:
                from .sharded_linears import empty_parameters  # imports bitsandbytes

                rows: Any = own_parameters(module)["scales"]
                weights.quantized.append((module, "scales", local_tensor(rows).detach()))
                empty_parameters(module)
            elif parameter is not None and is_stock_parameter(parameter):
                weights.quantized.append((module, "weight", parameter))


def refuse_quantized(quantized: QuantizedPlan | None, directory: Path) -> None:
    """Raise :class:`ConfigError` for weights in 4 or 8 bits: saving them would make the rounding error permanent."""
    if quantized is not None:
        raise ConfigError(
            f"the weights are in {quantized.bits} bits, and saving them to {str(directory)!r} would make their "
            "rounding error permanent: merge adapters into 16 bits first, with hfscale.merge_and_unload(model, "
            "dtype=torch.bfloat16), or train an adapter (load the model with peft_config=...), of which "
            "save_pretrained writes only the adapter"
        )
