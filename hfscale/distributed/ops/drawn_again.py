"""Dropout that keeps no mask: the backward pass draws it again.

Dropout multiplies each entry by a number drawn for it, in memory order. So its gradient is the same dropout, with the
same draws, applied to the gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .overlap import Derive


class _DrawnAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, drop: Derive) -> Tensor:
        ctx.drop = drop
        return drop(x.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.drop(grads[0].contiguous()), None


def drawn_again(x: Tensor, drop: Derive) -> Tensor:
    """Return ``drop(x)``, and draw the mask again in the backward pass instead of keeping it.

    Args:
        drop: dropout that draws the same numbers whenever it is called.
    """
    found: Tensor = _DrawnAgain.apply(x, drop)
    return found
