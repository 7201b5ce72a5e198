"""Dequantize 4-bit weights once for the recomputed forward pass and the backward pass after it.

bitsandbytes' projections save no dequantized weights. Therefore a checkpointed layer dequantizes each weight three
times in a step: for the output, for the recomputed output, and for the gradient of the input. Under torch's
checkpoint, a saved tensor takes no memory until the forward pass is repeated, and is freed when the backward pass
reads it. So in a checkpointed layer a projection becomes an ordinary product whose dequantized weight autograd saves,
and the third dequantization is not needed. The dequantized weights of one checkpointed layer are in memory at a time.

Projections that bitsandbytes multiplies by a kernel that dequantizes while it multiplies are left as they are, because
that kernel rounds differently.
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
    """Let the backward pass of bitsandbytes' 4-bit projections reuse the recomputation's dequantized weights."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Replace the forward pass of stock projections; outside of checkpointed layers it calls the stock code."""
        import bitsandbytes

        for module in runtime.model.modules():
            if type(module) is bitsandbytes.nn.Linear4bit and "forward" not in vars(module):
                vars(module)["forward"] = MethodType(_forward, module)


def _forward(module: Any, x: Tensor) -> Tensor:
    """Compute a stock projection; in checkpointed layers from the dequantized weight, which autograd saves."""
    if torch.compiler.is_compiling() or not is_checkpointed():
        return _stock(module, x)
    weight = own_parameters(module)["weight"]
    state: Any = getattr(weight, "quant_state", None)
    computed_in = module.compute_dtype or x.dtype
    same = is_stock_parameter(weight) and state is not None and state.dtype == computed_in
    is_set = module.compute_type_is_set
    if not (same and is_set and state.shape[-1] == x.shape[-1] and multiplies_values(x)):
        return _stock(module, x)
    if module.bias is not None and module.bias.requires_grad:
        return _stock(module, x)  # bitsandbytes sums the gradient of a bias in the bias's own dtype
    bias = None if module.bias is None else module.bias.to(computed_in)
    values = dequantized_stock(module, weight)
    return nn.functional.linear(x.to(computed_in), values, bias).to(x.dtype)


def _stock(module: Any, x: Tensor) -> Tensor:
    found: Tensor = type(module).forward(module, x)
    return found
