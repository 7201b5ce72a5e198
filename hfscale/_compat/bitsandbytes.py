"""Undocumented names of bitsandbytes: attributes of modules and parameters that store scales of quantized weights.

Read and run with bitsandbytes 0.50. Imported on first use only: most runs quantize nothing.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .lasting import leave_out_of_log
from .torch import own_parameters
from .torch_device import ACCELERATOR

_MOST_FUSED_ROWS = 1536  # bitsandbytes 0.50 multiplies more rows by cuBLAS; on ROCm, more than 256
_PARAMETERS = ("Params4bit", "Int8Params")


# When PEFT imports bitsandbytes, or transformers for its Trainer, bitsandbytes recommends an optional package on CPUs
# with AVX-512 for bfloat16. Every process of a run would log that, although most runs quantize nothing.
leave_out_of_log("bitsandbytes.backends.cpu.ops", "`pip install kernels`")


def functional() -> Any:
    """Return bitsandbytes' module of functions on tensors."""
    import bitsandbytes.functional

    return bitsandbytes.functional


@cache
def misreads_rows(width: int) -> bool:
    """Return whether bitsandbytes' CPU kernel reads wrong scales for 4-bit rows of ``width`` values, as 0.50.2 does."""
    matrix = torch.linspace(-1, 1, 64 * width).pow(3).view(64, width)
    stored, state = functional().quantize_4bit(matrix, blocksize=64, quant_type="nf4")
    values = functional().dequantize_4bit(stored, state)
    state.shape = torch.Size((1, 64 * width))
    return not torch.equal(values, functional().dequantize_4bit(stored, state).view_as(values))


def multiplies_values(x: Tensor) -> bool:
    """Return whether bitsandbytes multiplies ``x [..., in]`` by a 4-bit weight with ``dequantize_4bit`` and torch's
    own product. If so, a product computed by hfscale with dequantized values is equal bit for bit.
    """
    rows = x.numel() // max(1, x.shape[-1])
    return x.device.type == "cpu" or (x.device.type == ACCELERATOR and rows > _MOST_FUSED_ROWS)


def writes_into(device: torch.device) -> bool:
    """Return whether ``dequantize_4bit`` takes ``out``, memory for the values; bitsandbytes' CPU code does not."""
    return device.type == "cuda" and not torch.compiler.is_compiling()


def optimizers() -> Any:
    """Return bitsandbytes' module of optimizers."""
    import bitsandbytes.optim

    return bitsandbytes.optim


def parameters_in_8_bits(optimizer: Any) -> Iterator[tuple[Tensor, int]]:
    """Yield ``(parameter, enough)`` for each parameter whose states a bitsandbytes optimizer keeps in 8 bits if the
    parameter has at least ``enough`` entries. Other optimizers yield nothing.
    """
    if "bitsandbytes" not in sys.modules or not isinstance(optimizer, _eight_bit_class()):
        return
    for place, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            config = optimizer.get_config(place, index, group)
            if config["optim_bits"] == 8:
                yield parameter, int(config["min_8bit_size"])


def _eight_bit_class() -> Any:
    from bitsandbytes.optim.optimizer import Optimizer8bit

    return Optimizer8bit


def keep_overrides_apart(optimizer: Any) -> None:
    """Give a bitsandbytes optimizer its own table of overridden options. bitsandbytes has one table per process,
    indexed by position in the parameter groups, so an override by a Trainer would also apply to the parameters of other
    optimizers.
    """
    shared = getattr(optimizer, "mng", None)
    if shared is not None:
        optimizer.mng = copy.copy(shared)
        optimizer.mng.index2config = {}


def is_stock_parameter(parameter: Any) -> bool:
    """Return whether the parameter is of one of bitsandbytes' own classes, which store the scales of their weights."""
    return type(parameter).__name__ in _PARAMETERS


def is_quantized_already(parameter: Tensor) -> bool:
    """Return whether a parameter of bitsandbytes' classes already holds a quantized weight, not the original weight."""
    return not parameter.is_floating_point() or getattr(parameter, "bnb_quantized", False)


def keep_layout(module: Any) -> None:
    """Let a projection keep the memory layout of its weight, which bitsandbytes repacks for evaluation on some CPUs."""
    module.support_avx512bf16_for_cpu = False


def set_state(module: Any, parameter: Any, state: Any) -> None:
    """Set the quantization state of ``parameter`` in ``module``; the scales of ``state`` are not quantized
    themselves.
    """
    parameter.quant_state = module.quant_state = state
    parameter.bnb_quantized = True
    parameter.compress_statistics = False


scales_of_rows: Callable[[Any], Tensor] = attrgetter("SCB")
"""Return the scales of an 8-bit parameter that has just been quantized."""


def dequantized_stock(module: Any, parameter: Any) -> Tensor:
    """Dequantize a parameter of ``module`` that has one of bitsandbytes' own classes; return a 4-bit parameter in the
    dtype that it had before quantization.
    """
    if type(parameter).__name__ == _PARAMETERS[0]:
        return functional().dequantize_4bit(parameter.data, parameter.quant_state)
    # the scales of 8-bit parameters move to the module in its first forward pass
    scales = parameter.SCB if parameter.SCB is not None else module.state.SCB
    return functional().int8_vectorwise_dequant(parameter.data, scales)


def product_in_8_bits(
    module: Any, x: Tensor, rows: Tensor, scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute ``x @ rows.T + bias`` like the 8-bit projection ``module``, but with the quantized weight ``rows`` and
    its ``scales`` instead of the module's own.
    """
    import bitsandbytes

    bnb: Any = bitsandbytes  # has few type hints
    state = bnb.MatmulLtState()
    state.threshold = module.state.threshold
    state.has_fp16_weights = False
    state.use_pool = module.state.use_pool
    state.is_training = module.training
    state.CB = rows
    state.SCB = scales
    return bnb.matmul(x, state.CB, bias=bias, state=state)


def tensors_beside_weight(module: nn.Module) -> Iterator[Any]:
    """Yield the tensors that ``module`` needs to dequantize its weight: scales, codes, offsets; ``None`` for absent
    ones.
    """
    parameter = own_parameters(module).get("weight")
    yield getattr(parameter, "SCB", None)
    yield from (
        getattr(
            getattr(module, "state", None),
            name,
            None,
        )
        for name in ("CB", "SCB")
    )
    state = getattr(parameter, "quant_state", None)
    if isinstance(parameter, nn.Parameter) and state is not None:
        yield from (state.absmax, state.code, state.offset)
        if state.nested:
            yield from (state.state2.absmax, state.state2.code)
