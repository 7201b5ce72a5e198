"""Tokens for heads: a rank gets some heads of the whole sequence, for all heads of its tokens (Jacobs et al. 2023).

::

    [b, h, s/n, d] --all-to-all--> [b, h/n, s, d]      backward: the same exchange the other way
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...sequences.split import Split


def fits(heads: int, key_heads: int, size: int) -> bool:
    """Whether ``size`` ranks can share out the heads: evenly, and each key head to whole ranks or the reverse."""
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def replicated(x: Tensor, size: int) -> Tensor:
    """``[b, h, s, d]`` -> one head for each of ``size`` ranks at least: replicas of those that several ranks read."""
    return x if x.shape[1] >= size else x.repeat_interleave(size // x.shape[1], 1)


def heads_of_tokens(x: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
    """``[b, h, s of this rank, d]`` -> ``[b, h / n, s, d]``, in the order of the sequence; differentiable."""
    found: Tensor = _ToHeads.apply(x, split, group)
    return found


def tokens_of_heads(x: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
    """``[b, h / n, s, d]`` -> ``[b, h, s of this rank, d]``; differentiable."""
    found: Tensor = _ToTokens.apply(x, split, group)
    return found


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = split, group
        return _to_heads(x, split, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _to_tokens(grads[0], *ctx.arguments), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = split, group
        return _to_tokens(x, split, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _to_heads(grads[0], *ctx.arguments), None, None


def _to_heads(x: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
    b, h, _, d = x.shape
    parts = list(x.chunk(split.size, 1))
    received = _exchanged(parts, [(b, h // split.size, length, d) for length in split.lengths], group)
    return torch.cat(received, 2).index_select(2, split.order.to(x.device))


def _to_tokens(x: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
    b, h, _, d = x.shape
    parts = [x.index_select(2, split.places(rank).to(x.device)) for rank in range(split.size)]
    own = split.length(dist.get_rank(group))
    return torch.cat(_exchanged(parts, [(b, h, own, d)] * split.size, group), 1)


def _exchanged(parts: list[Tensor], shapes: list[tuple[int, ...]], group: dist.ProcessGroup) -> list[Tensor]:
    """Send ``parts[r]`` to rank ``r``; what comes from rank ``r`` has the shape ``shapes[r]``."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = parts[0].new_empty(sum(sizes))
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_to_all_single(received, flat, sizes, [part.numel() for part in parts], group=group)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
