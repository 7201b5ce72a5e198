"""Represent a weight that data ranks have all-gathered in 8 bits, in place of the parameter."""

from typing import Any

import torch
from torch import Tensor

from ..._compat.torch import as_plain_tensors, tensor_without_memory
from ...errors import ConfigError

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.view.default, _aten.as_strided.default)
_LIKE = (
    _aten.zeros_like.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.new_empty.default,
)


class Float8Weight(Tensor):
    """Stand in for a parameter ``[out, in]`` while it is gathered. Its ``dtype`` is the dtype of the gradient, so that
    autograd can use it like the parameter.
    """

    entries: Tensor  # the weight times its scale, rounded to 8 bits
    # a scalar tensor, the same object in all views of the weight, so that it can be updated with the entries
    scale: Tensor

    def __new__(cls, entries: Tensor, scale: Tensor, dtype: torch.dtype) -> "Float8Weight":
        """Make a tensor whose reported dtype is ``dtype``."""
        made: Float8Weight = tensor_without_memory(cls, tuple(entries.shape), dtype, entries.device)
        made.entries = entries
        made.scale = scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the inner tensors, and the dtype (torch's protocol for tensor subclasses)."""
        return ["entries", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(made_of: dict[str, Tensor], dtype: Any, *_: Any) -> "Float8Weight":
        """Make the weight from its inner tensors (torch's protocol for tensor subclasses)."""
        return Float8Weight(made_of["entries"], made_of["scale"], dtype)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Call ``func`` unchanged; its operators are handled by :meth:`__torch_dispatch__`."""
        return as_plain_tensors(func, *args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the weight if it does not read the weight's entries: return a view of the weight, or a new
        plain tensor of its shape and dtype. Raise :class:`ConfigError` for all other operators.
        """
        weight = args[0]
        if func is _aten.t.default:
            return cls(weight.entries.t(), weight.scale, weight.dtype)
        if func in _SAME and (len(args) == 1 or tuple(args[1]) == tuple(weight.shape)):
            return cls(weight.entries, weight.scale, weight.dtype)
        if func in _LIKE:
            plain = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            return func(
                plain,
                *args[1:],
                **{"device": weight.device, **(kwargs or {})},
            )
        raise ConfigError(
            f"{func} reads a weight that data ranks have gathered in 8 bits, which only the products of "
            "mixed_precision='fp8' can use: use float8=hfscale.Float8Config(fp8_all_gather=False), or read weights "
            "between steps"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8Weight({tuple(self.shape)}, dtype={self.dtype})"
