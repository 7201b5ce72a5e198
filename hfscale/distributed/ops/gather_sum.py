"""Enter a tensor-parallel region from sequence shards: all-gather forward, reduce-scatter backward.

::

    rank 0: [a]  ----> [a b]        backward   (g0 + g1)[:len a] <---- g0
    rank 1: [b]  ----> [a b]                   (g0 + g1)[len a:] <---- g1

``g`` bar in Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.2.2. Ranks compute different things
with the gathered tensor, so each has a partial gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import start_all_gather, start_reduce_scatter


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, lengths: Sequence[int], dim: int, group: dist.ProcessGroup, known: Tensor | None
    ) -> Tensor:
        ctx.arguments = lengths, dim, group
        return start_all_gather(x, lengths, dim, group).result() if known is None else known.view_as(known)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return start_reduce_scatter(grads[0], *ctx.arguments).result(), None, None, None, None


def gather_sum(
    x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, dim: int = 1, known: Tensor | None = None
) -> Tensor:
    """All-gather ``x``, ``lengths[rank]`` entries along ``dim`` on each rank of ``group``; reduce-scatter its gradient.

    Args:
        known: the gathered tensor, if there is one already; only the backward pass communicates then.
    """
    return _GatherSum.apply(x, lengths, dim, group, None if known is None else known.detach())
