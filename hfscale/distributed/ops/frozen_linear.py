"""Matrix multiplications with frozen weights that are dequantized for the forward pass and again for the backward pass.

Autograd keeps no weight in between, neither in 16 bits nor packed: the weight is read again, so its bytes may be
resharded in between and gathered again, as FSDP does (ZeRO stage 3, Rajbhandari et al. 2020).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .grouped_linear import grouped_linear, rows_of_groups

Read = Callable[[torch.dtype], Tensor]
"""Returns the weight, dequantized to a dtype."""


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, product: Callable[[Tensor, Tensor | None], Tensor], read: Read
    ) -> Tensor:
        ctx.read, ctx.bias_type = read, None if bias is None else bias.dtype
        return product(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad = grads[0]
        of_x = torch.matmul(grad, ctx.read(grad.dtype)) if ctx.needs_input_grad[0] else None
        of_bias = None
        if ctx.needs_input_grad[1]:
            of_bias = grad.flatten(0, -2).sum(0, dtype=ctx.bias_type)
        return of_x, of_bias, None, None


def frozen_linear(
    x: Tensor, bias: Tensor | None, product: Callable[[Tensor, Tensor | None], Tensor], read: Read
) -> Tensor:
    """Return ``product(x, bias)``, which is ``x [..., in] @ weight.T + bias``, differentiable in ``x`` and ``bias``.

    Args:
        read: returns the weight ``[out, in]`` in a dtype; called in the backward pass.
    """
    out: Tensor = _FrozenLinear.apply(x, bias, product, read)
    return out


class _FrozenGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, read: Read, counts: Sequence[int], transposed: bool) -> Tensor:
        ctx.read, ctx.counts, ctx.transposed = read, counts, transposed
        return grouped_linear(x, read(x.dtype), None, counts, transposed=transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight = ctx.read(grads[0].dtype)
        return grouped_linear(grads[0], weight, None, ctx.counts, transposed=not ctx.transposed), None, None, None


def frozen_grouped_linear(
    x: Tensor, read: Read, bias: Tensor | None, counts: Sequence[int], *, transposed: bool = False
) -> Tensor:
    """Compute :func:`~hfscale.distributed.ops.grouped_linear.grouped_linear` with a frozen weight.

    Args:
        read: returns the weight in a dtype, ``[groups, n, k]``, or ``[groups, k, n]`` if ``transposed``; called in both
            passes.
    """
    out: Tensor = _FrozenGroupedLinear.apply(x, read, counts, transposed)
    if bias is not None:
        out = out + rows_of_groups(bias, counts, x.shape[0])
    return out
