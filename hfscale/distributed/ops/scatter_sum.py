"""Leave a tensor-parallel region into sequence shards: reduce-scatter forward, all-gather backward.

::

    rank 0: [a0 b0] ----> [a0 + a1]        backward   [ga gb] <---- [ga]
    rank 1: [a1 b1] ----> [b0 + b1]                   [ga gb] <---- [gb]

``g`` in Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.2.2.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import start_all_gather, start_reduce_scatter


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Sequence[int], dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = lengths, dim, group
        return start_reduce_scatter(x, lengths, dim, group).result()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return start_all_gather(grads[0], *ctx.arguments).result(), None, None, None


def scatter_sum(x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """Reduce-scatter partial sums ``x`` over the ranks of ``group``, ``lengths[rank]`` entries of ``dim`` to each."""
    return _ScatterSum.apply(x, lengths, dim, group)
