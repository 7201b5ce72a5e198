"""Gather a last dim that is cut over ranks: all-gather forward, this rank's slice backward.

::

    rank 0: [a]  ----> [a b]        backward   g[:len a] <---- g
    rank 1: [b]  ----> [a b]                   g[len a:] <---- g

Slices may differ in length (a vocabulary that does not divide): they travel padded to the longest. The gradient that
comes back is equal on all ranks, because what follows is computed on all of them alike.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.lengths = dist.get_rank(group), lengths
        padded = torch.nn.functional.pad(x, (0, max(lengths) - x.shape[-1])).contiguous()
        pieces = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(pieces, padded, group=group)
        return torch.cat([piece[..., :length] for piece, length in zip(pieces, lengths, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        start = sum(ctx.lengths[: ctx.rank])
        return grads[0].narrow(-1, start, ctx.lengths[ctx.rank]), None, None


def gather_last_dim(x: Tensor, lengths: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """``x`` of shape ``[..., lengths[rank]]`` on each rank of ``group`` -> ``[..., sum(lengths)]`` on all of them."""
    return x if group is None else _GatherLastDim.apply(x, lengths, group)
