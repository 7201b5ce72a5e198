"""Enter a tensor-parallel region: identity forward, all-reduce backward.

::

    rank 0: x ----> x        backward   g = g0 + g1 <---- g0
    rank 1: x ----> x                   g = g0 + g1 <---- g1

``f`` in Shoeybi et al. 2019 (Megatron-LM), section 3. It also serves a replicated parameter used inside the region:
each rank has a partial gradient, and their sum is the gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import all_reduce


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy, since autograd may hand the same gradient tensor to another branch.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        return all_reduce(grad, ctx.group), None


def enter(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return ``x``, any shape, equal on all ranks of ``group``, and all-reduce its gradient over them."""
    return x if group is None else _Enter.apply(x, group)
