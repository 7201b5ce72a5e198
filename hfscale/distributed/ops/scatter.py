"""Keep this rank's shard of a dim: a slice forward, all-gather backward.

::

    rank 0: [a b] ----> [a]        backward   [ga gb] <---- [ga]
    rank 1: [a b] ----> [b]                   [ga gb] <---- [gb]

All ranks computed the input alike, and so they do its gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import start_all_gather


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Sequence[int], dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.arguments, rank = (lengths, dim, group), dist.get_rank(group)
        # A copy, also where the slice is contiguous (one sample), so that the full tensor can be freed.
        return x.narrow(dim, sum(lengths[:rank]), lengths[rank]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return start_all_gather(grads[0], *ctx.arguments).result(), None, None, None


def scatter(x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """Return this rank's ``lengths[rank]`` entries along ``dim`` of ``x``, which is equal on all ranks of ``group``."""
    return _Scatter.apply(x, lengths, dim, group)
