"""List families that change dtypes inside, and keep float64 models in float64, to compare at 1e-12.

Stock models cast to float32 inside norms, softmax and losses. Two computations of the same value then differ by float32
rounding, which hides errors up to 1e-7.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WIDENS_INSIDE = ("ctrl", "inkling2", "inkling2_text", "minimax", "openai-gpt")
"""Families whose layers widen activations to 32 bits, or have buffers that do or that take the type of what they are
given, and go on with weights as they are: mixed precision is autocast alone there, over data ranks too."""

WIDENS_AROUND = ("xglm",)
"""Families that add a table in 32 bits to hidden states in front of their layers, which FSDP2 brings back to 16."""


_MAKERS = (torch.empty, torch.ones, torch.zeros)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, nn.functional.linear)


def _differ(operands: Any) -> bool:
    """Return whether operands have several types; those that PEFT names are not among them."""
    return len({operand.dtype for operand in operands}) > 1


class _KeepFloat64(TorchFunctionMode):
    """Ignore casts of float64 tensors to float32 inside the with block."""

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
            # One of them was made of integers, or is a router's weight, which some classes keep in 32 bits.
            args = (args[0].double(), args[1].double(), *args[2:])
        if func is torch.full and "dtype" not in kwargs:
            value = args[1] if len(args) > 1 else kwargs["fill_value"]
            if abs(value) > torch.finfo(torch.float32).max:
                # A float64 model's own constant, in the default type.
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


keep_float64 = _KeepFloat64


class _MakeFloat64(TorchFunctionMode):
    """Make in 64 bits, inside the with block, the parameters that a class of a float64 model makes in 32 bits.

    Since transformers 5.24 routers do. FSDP2's parameters cannot be converted afterwards. While a class makes its
    parameters the default type is the model's; what proofs run inside the block stays as it is.
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
