"""Leave a tensor-parallel region: all-reduce forward, identity backward.

::

    rank 0: x0 ----> x0 + x1        backward   g <---- g
    rank 1: x1 ----> x0 + x1                   g <---- g

``g`` in Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import all_reduce


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        return all_reduce(total, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def leave(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce the partial results ``x``, any shape, over the ranks of ``group``."""
    return x if group is None else _Leave.apply(x, group)
