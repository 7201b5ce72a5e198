"""Names of bitsandbytes that it does not document: what its modules and parameters keep beside a quantized weight.

Read and run with bitsandbytes 0.50. Nothing here imports it before it is asked for: most runs quantize nothing.
"""

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .torch import own_parameters

_PARAMETERS = ("Params4bit", "Int8Params")


def _is_no_recommendation(record: logging.LogRecord) -> bool:
    return "`pip install kernels`" not in str(record.msg)


# Whoever imports it - PEFT does, and transformers for its Trainer - is recommended a package that it can do without,
# where a processor has AVX-512 for bfloat16: in every process of a run, most of which quantize nothing.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_no_recommendation)


def functional() -> Any:
    """Its functions on tensors."""
    import bitsandbytes.functional

    return bitsandbytes.functional


@cache
def misreads_rows(width: int) -> bool:
    """Whether its kernel for this processor takes wrong scales for 4-bit matrices with rows of ``width`` values: that
    of 0.50.2 does for many that are no whole blocks of 64, the kernels of GPUs do not.
    """
    matrix = torch.linspace(-1, 1, 64 * width).pow(3).view(64, width)
    packed, state = functional().quantize_4bit(matrix, blocksize=64, quant_type="nf4")
    found = functional().dequantize_4bit(packed, state)
    state.shape = torch.Size((1, 64 * width))
    return not torch.equal(found, functional().dequantize_4bit(packed, state).view_as(found))


def optimizers() -> Any:
    """Its optimizers."""
    import bitsandbytes.optim

    return bitsandbytes.optim


def is_stock_parameter(parameter: Any) -> bool:
    """Whether it is of one of bitsandbytes' own classes of parameters, which know their scales."""
    return type(parameter).__name__ in _PARAMETERS


def is_in_4_bits(parameter: Any) -> bool:
    """Whether it is of bitsandbytes' class for 4 bits."""
    return type(parameter).__name__ == _PARAMETERS[0]


def is_quantized_already(parameter: Tensor) -> bool:
    """Whether a parameter of those classes holds a quantized weight, and no more the one it is made of."""
    return not parameter.is_floating_point() or getattr(parameter, "bnb_quantized", False)


def keep_layout(module: Any) -> None:
    """Let a projection keep its weight as it is: some processors have a layout for evaluation, made in its place."""
    module.support_avx512bf16_for_cpu = False


def has_layouts(module: nn.Module) -> bool:
    """Whether :func:`keep_layout` says something to ``module``."""
    return hasattr(module, "support_avx512bf16_for_cpu")


def set_state(module: Any, parameter: Any, state: Any) -> None:
    """Let ``parameter``, packed bytes in ``module``, be quantized by ``state``, whose scales are plain."""
    parameter.quant_state = module.quant_state = state
    parameter.bnb_quantized, parameter.compress_statistics = True, False


def drop_state(module: Any) -> None:
    """Let a projection in 4 bits forget how its weight is quantized."""
    module.quant_state = None


def scales_of_rows(parameter: Any) -> Tensor:
    """The scales of an 8-bit parameter that has just been quantized."""
    scales: Tensor = parameter.SCB
    return scales


def dequantized_from_4_bits(parameter: Any) -> Tensor:
    """A parameter of bitsandbytes' own class in the type it was quantized from."""
    found: Tensor = functional().dequantize_4bit(parameter.data, parameter.quant_state)
    return found


def dequantized_from_8_bits(module: Any, parameter: Any) -> Tensor:
    """The same of one in 8 bits, in ``module``, to which it gives its scales in the first pass."""
    scales = parameter.SCB if parameter.SCB is not None else module.state.SCB
    found: Tensor = functional().int8_vectorwise_dequant(parameter.data, scales)
    return found


def product_in_8_bits(module: Any, x: Tensor, rows: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ rows.T + bias`` as ``module``, a projection in 8 bits, computes it, with ``rows`` for its weight."""
    import bitsandbytes

    bnb: Any = bitsandbytes  # whose types say little
    state = bnb.MatmulLtState()
    state.threshold, state.has_fp16_weights = module.state.threshold, False
    state.use_pool, state.is_training = module.state.use_pool, module.training
    state.CB, state.SCB = rows, scales
    out: Tensor = bnb.matmul(x, state.CB, bias=bias, state=state)
    return out


def tensors_beside_weight(module: nn.Module) -> Iterator[Any]:
    """What ``module`` and its weight keep to read the weight by; ``None`` for what is not there."""
    parameter = own_parameters(module).get("weight")
    yield getattr(parameter, "SCB", None)
    yield from (getattr(getattr(module, "state", None), name, None) for name in ("CB", "SCB"))
    state = getattr(parameter, "quant_state", None)
    if isinstance(parameter, nn.Parameter) and state is not None:
        yield from (state.absmax, state.code, state.offset)
        if state.nested:
            yield from (state.state2.absmax, state.state2.code)
