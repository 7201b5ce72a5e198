"""Gather a dim that is cut over ranks: all-gather forward, this rank's slice backward.

::

    rank 0: [a]  ----> [a b]        backward   g[:len a] <---- g
    rank 1: [b]  ----> [a b]                   g[len a:] <---- g

Slices may differ in length (a vocabulary that does not divide). All ranks compute alike with the gathered tensor, so
its gradient is equal on all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import start_all_gather


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Sequence[int], dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.lengths, ctx.rank = dim, lengths, dist.get_rank(group)
        return start_all_gather(x, lengths, dim, group).result()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].narrow(ctx.dim, sum(ctx.lengths[: ctx.rank]), ctx.lengths[ctx.rank]), None, None, None


def gather(x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup | None, dim: int = -1) -> Tensor:
    """All-gather ``x``, ``lengths[rank]`` entries along ``dim`` on each rank of ``group``."""
    return x if group is None else _Gather.apply(x, lengths, dim, group)
