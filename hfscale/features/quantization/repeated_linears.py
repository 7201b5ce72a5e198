"""Dequantize weights in 4 bits once for a recomputed forward pass and the backward pass behind it.

bitsandbytes' projections keep no values, so a checkpointed layer dequantizes each weight three times in a step: for the
output, for the output again, and for the gradient of the input. Under torch's checkpoint a saved tensor costs nothing
until the pass is repeated, and is freed as the backward pass reads it; so there a projection is a plain product whose
weight autograd saves, and the third time falls away. The values of one checkpointed layer are held meanwhile.

Where bitsandbytes multiplies by a kernel that dequantizes on the way, which rounds otherwise, its projection stays.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.bitsandbytes import (
    dequantized_stock,
    is_stock_parameter,
    multiplies_values,
)
from ..._compat.torch import is_checkpointed, own_parameters
from ...train.runtime import Part, Runtime
from ...train.runtime.shards import LocalWeights


class RepeatedLinears(Part):
    """A part that lets bitsandbytes' own projections in 4 bits share values with the backward pass."""

    def is_needed(self, runtime: Runtime) -> bool:
        """Return whether weights are in 4 bits."""
        quantized = runtime.plan.quantized
        return quantized is not None and quantized.bits == 4

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Replace the forward pass of stock projections, which calls theirs where layers are not checkpointed."""
        import bitsandbytes

        for module in runtime.model.modules():
            if type(module) is bitsandbytes.nn.Linear4bit and "forward" not in vars(module):
                vars(module)["forward"] = MethodType(_forward, module)


def _forward(module: Any, x: Tensor) -> Tensor:
    """Compute a stock projection, by values that autograd saves where a checkpoint makes them again."""
    if torch.compiler.is_compiling() or not is_checkpointed():
        return _stock(module, x)
    weight = own_parameters(module)["weight"]
    state: Any = getattr(weight, "quant_state", None)
    computed_in = module.compute_dtype or x.dtype
    same = is_stock_parameter(weight) and state is not None and state.dtype == computed_in
    is_set = module.compute_type_is_set
    if not (same and is_set and state.shape[-1] == x.shape[-1] and multiplies_values(x)):
        return _stock(module, x)
    bias = None if module.bias is None else module.bias.to(computed_in)
    values = dequantized_stock(module, weight)
    return nn.functional.linear(x.to(computed_in), values, bias).to(x.dtype)


def _stock(module: Any, x: Tensor) -> Tensor:
    found: Tensor = type(module).forward(module, x)
    return found
