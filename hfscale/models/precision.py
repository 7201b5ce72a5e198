"""List families that change dtypes inside the model, and keep float64 models in float64 for comparisons at 1e-12.

Stock models cast to float32 inside norms, softmax and losses. Two computations of the same value then differ by float32
rounding, which would hide errors up to 1e-7.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WIDENS_INSIDE = ("ctrl", "inkling2", "inkling2_text", "minimax", "openai-gpt")
"""Families whose layers compute some activations in 32 bits, or have buffers in 32 bits or in the dtype of the layers'
inputs, and then use weights without a cast to the same dtype. With several data ranks, mixed precision therefore uses
only autocast for them, and not FSDP2's casts.
"""

WIDENS_AROUND = ("xglm",)
"""Families that add a 32-bit table to hidden states before their layers; FSDP2 casts the sum back to 16 bits."""


_MAKERS = (torch.empty, torch.ones, torch.zeros)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, nn.functional.linear)


def _differ(operands: Any) -> bool:
    """Return whether the operands have different dtypes."""
    return len({operand.dtype for operand in operands}) > 1


class _KeepFloat64(TorchFunctionMode):
    """Ignore casts of float64 tensors to float32 inside a with block."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = (args[0], *(torch.float64 if arg is torch.float32 else arg for arg in args[1:]))
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if func is nn.functional.grid_sample:
                args = (args[0], args[1].double(), *args[2:])
        if func in _PRODUCTS and _differ(args[:2]):
            # One operand was computed from integers, or is a router's weight. Some classes keep them in 32 bits.
            args = (args[0].double(), args[1].double(), *args[2:])
        if func is torch.full and "dtype" not in kwargs:
            value = args[1] if len(args) > 1 else kwargs["fill_value"]
            if abs(value) > torch.finfo(torch.float32).max:
                # A constant of a float64 model, which would not fit into the default dtype.
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


keep_float64 = _KeepFloat64


class _MakeFloat64(TorchFunctionMode):
    """Create parameters of a float64 model in float64, inside a with block, where a class requests float32.

    Routers request float32 since transformers 5.24, and FSDP2's parameters cannot be converted afterwards. The model's
    dtype is the default dtype only while a class creates its parameters, so other computations inside the block are not
    affected.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        makes_parameters = func in _MAKERS and torch.get_default_dtype() == torch.float64
        if makes_parameters and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


make_float64 = _MakeFloat64
