"""Ulysses attention (Jacobs et al. 2023): exchange all heads of a rank's tokens for some heads of the full sequence.

::

    [b, h, s/n, d] --all-to-all--> [b, h/n, s, d]      backward: the same exchange the other way

Where there are more ranks than heads, groups of ranks do that with the tokens of their group, and keys and values
travel around a ring of such groups (Fang and Zhao 2024).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.all_to_all import all_to_all


def replicated(x: Tensor, size: int) -> Tensor:
    """Repeat the heads of ``x [b, h, s, d]`` until each of ``size`` ranks gets at least one."""
    return x if x.shape[1] >= size else x.repeat_interleave(size // x.shape[1], 1)


class HeadExchange:
    """Differentiable all-to-all between sharding by tokens and sharding by heads.

    Args:
        members: for each rank of ``group``, the positions of its tokens in the group's tokens.
        group: the ranks that exchange.
    """

    def __init__(self, members: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self.members, self.group = list(members), group
        self.order = torch.cat(self.members).argsort()
        self.own = dist.get_rank(group)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange ``[b, h, s of this rank, d]`` for ``[b, h / n, s of all, d]``, in the order of the sequence."""
        found: Tensor = _Exchange.apply(x, self, True)
        return found

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange ``[b, h / n, s of all, d]`` for ``[b, h, s of this rank, d]``."""
        found: Tensor = _Exchange.apply(x, self, False)
        return found


class _Exchange(torch.autograd.Function):
    """Exchange in one direction forward and in the other backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadExchange, to_heads: bool) -> Tensor:
        ctx.exchange, ctx.back = exchange, _to_tokens if to_heads else _to_heads
        return (_to_heads if to_heads else _to_tokens)(x, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0], ctx.exchange), None, None


def _to_heads(x: Tensor, exchange: HeadExchange) -> Tensor:
    b, h, _, d = x.shape
    size = len(exchange.members)
    shapes = [(b, h // size, len(member), d) for member in exchange.members]
    received = _exchanged(list(x.chunk(size, 1)), shapes, exchange.group)
    return torch.cat(received, 2).index_select(2, exchange.order.to(x.device))


def _to_tokens(x: Tensor, exchange: HeadExchange) -> Tensor:
    b, h, _, d = x.shape
    parts = [x.index_select(2, member.to(x.device)) for member in exchange.members]
    own = len(exchange.members[exchange.own])
    return torch.cat(_exchanged(parts, [(b, h, own, d)] * len(parts), exchange.group), 1)


def _exchanged(parts: list[Tensor], shapes: Sequence[tuple[int, ...]], group: dist.ProcessGroup) -> list[Tensor]:
    """Send ``parts[r]`` to rank ``r``, and return the tensors received, ``shapes[r]`` from rank ``r``."""
    sizes = [prod(shape) for shape in shapes]
    flat = torch.cat([part.reshape(-1) for part in parts])
    received = all_to_all(flat, [part.numel() for part in parts], sizes, group)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
