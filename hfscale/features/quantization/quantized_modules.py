"""Check and plan a frozen base model in 4 or 8 bits, and dequantize its weights, in any layout.

``quantization_config=BitsAndBytesConfig(...)`` is transformers' own. :mod:`.plan` chooses and checks the
weights before any weight is read, and :mod:`.arrival` quantizes the weights while they are loaded. This module returns
quantized weights of loaded modules.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import bitsandbytes
from ..._compat.torch import own_parameters
from ...distributed.ops.quantized_weights import (
    encodings_of,
    gathered,
)
from ...errors import ConfigError

ROWS = "ShardedLinear8bitLt"


def is_quantized(module: nn.Module, name: str = "weight") -> bool:
    """Return whether the parameter ``name`` of ``module`` itself is held in 4 or 8 bits."""
    stock = bitsandbytes.is_stock_parameter(own_parameters(module).get(name))
    return (
        stock
        or name in encodings_of(module)
        or (name == "weight" and type(module).__name__ == ROWS)
    )


def dequantized(module: nn.Module, name: str = "weight") -> Tensor:
    """Return the quantized weight ``name`` of a module on this rank, dequantized to its dtype before quantization.

    If data ranks shard the weight, all of them must call this function. Each gets the weight gathered over the data
    axes, which is still this rank's shard over the tensor, expert and pipeline axes. The shape is ``[out, in]`` for a
    projection (also for a ``Conv1D``, which is stored transposed), and ``[experts, ...]`` for experts.

    Raises:
        ConfigError: the weight is not quantized.
    """
    parameter: Any = own_parameters(module).get(name)
    encoding = encodings_of(module).get(name)
    if encoding is not None:
        whole = encoding.decode(gathered(parameter))
        return whole if name != "weight" else whole[0]
    if not is_quantized(module, name):
        raise ConfigError(
            f"{type(module).__name__}.{name} is not quantized: it is a {type(parameter).__name__}, which needs no "
            "dequantization: read this parameter instead of calling the function"
        )
    with torch.no_grad():
        if type(module).__name__ == ROWS:
            from .sharded_linears import float_scales

            rows: Any = own_parameters(module)["scales"]
            return bitsandbytes.functional().int8_vectorwise_dequant(
                gathered(parameter), float_scales(gathered(rows))
            )
        return bitsandbytes.dequantized_stock(module, parameter)


def beside_quantized(model: nn.Module) -> Iterator[Any]:
    """Yield the tensors, like scales, that ``model`` holds in addition to its quantized values, in order to dequantize
    them; ``None`` in place of each tensor that a module does not have.
    """
    for module in model.modules():
        if type(module).__name__ == ROWS:
            yield own_parameters(module)["scales"]
        yield from bitsandbytes.tensors_beside_weight(module)
