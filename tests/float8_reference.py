"""Products in 8 bits as one process makes them: written out once more, to compare layouts with.

Entry by entry the roundings of torchao's float8 training, which has no other ranks to think of.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hfscale.features.fp8 import scaled_matmul as float8
from hfscale.models.module_kinds import PROJECTIONS, is_transposed


def in_32_bits(module: Any, name: str) -> Any:
    """Within: what scales or rounds stays in 32 bits where :func:`hfscale.models.precision.keep_float64` keeps 64.

    That keeps them in forward passes alone, and backward passes would find other numbers.
    """
    function = getattr(module, name)

    def without_modes(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return mock.patch.object(module, name, without_modes)


@contextmanager
def float8_in_32_bits() -> Iterator[None]:
    """The same of hfscale's own scales, and of what is multiplied by them: data ranks gather weights in both passes."""
    with in_32_bits(float8, "_scale_for"), in_32_bits(float8, "_rounded"):
        yield


def rounded(matrix: Tensor, rowwise: bool, along: int, gradient: bool = False) -> Tensor:
    """As one process rounds it, which has all of it."""
    dtype = torch.float8_e5m2 if gradient and not rowwise else torch.float8_e4m3fn
    largest = matrix.abs().amax(along, keepdim=True) if rowwise else matrix.abs().amax()
    most = torch.finfo(dtype).max
    with torch._C.DisableTorchFunction():
        scale = (most / largest.double().clamp(min=1e-12)).float()
        scale = scale.log2().floor().exp2() if rowwise else scale
        found = (matrix.to(torch.float32) * scale).clamp(-most, most).to(dtype).to(
            matrix.dtype
        ) / scale
        return found.to(matrix.dtype)


class OneProcess(torch.autograd.Function):
    """A product as :func:`rounded` operands give it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool) -> Tensor:
        """``[n, in]`` and ``[out, in]`` -> ``[n, out]``."""
        ctx.save_for_backward(x, weight)
        ctx.rowwise = rowwise
        return rounded(x, rowwise, 1).mm(rounded(weight, rowwise, 1).t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """To the input and to the weight."""
        (x, weight), grad, rowwise = ctx.saved_tensors, grads[0], ctx.rowwise
        to_x = rounded(grad, rowwise, 1, True).mm(rounded(weight, rowwise, 0))
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = rounded(grad, rowwise, 0, True).t().mm(rounded(x, rowwise, 0))
        return to_x, to_weight, None


def convert(model: nn.Module, recipe: str, chosen: Callable[[nn.Module, str], bool]) -> None:
    """Have one process round in the products of the linear projections that are ``chosen``, given each and its name."""

    def forward(linear: Any, x: Tensor) -> Tensor:
        weight = linear.weight.t() if is_transposed(linear) else linear.weight
        if torch.is_autocast_enabled(x.device.type):
            x, weight = (each.to(torch.get_autocast_dtype(x.device.type)) for each in (x, weight))
        found: Tensor = OneProcess.apply(x.flatten(0, -2), weight, recipe == "rowwise")
        found = found.view(*x.shape[:-1], -1)
        return found if linear.bias is None else found + linear.bias.to(found.dtype)

    for name, module in model.named_modules():
        if isinstance(module, PROJECTIONS) and chosen(module, name):
            module.forward = partial(forward, module)  # type: ignore[method-assign]
