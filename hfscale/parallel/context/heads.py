"""Exchange tokens for heads: a rank gets some heads of all tokens for all heads of its tokens (Jacobs et al. 2023).

::

    [b, h, s/n, d] --all-to-all--> [b, h/n, s, d]      backward: the same exchange the other way

Where ranks are more than heads can be shared out to, groups of them do that with the tokens they have together, and
keys travel around a ring of such groups (Fang and Zhao 2024).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.ops.all_to_all import all_to_all


def replicated(x: Tensor, size: int) -> Tensor:
    """Repeat the heads of ``[b, h, s, d]`` until each of ``size`` ranks has one."""
    return x if x.shape[1] >= size else x.repeat_interleave(size // x.shape[1], 1)


class HeadExchange:
    """Tokens for heads and back, between ranks that have parts of the same sequences; differentiable.

    Args:
        members: of each of these ranks, which tokens it has of those that they have together.
        group: the ranks.
    """

    def __init__(self, members: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self.members, self.group = list(members), group
        self.order = torch.cat(self.members).argsort()
        self.own = dist.get_rank(group)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange ``[b, h, s of this rank, d]`` for ``[b, h / n, s of all, d]``, in sequence order."""
        found: Tensor = _Exchange.apply(x, self, True)
        return found

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange ``[b, h / n, s of all, d]`` for ``[b, h, s of this rank, d]``."""
        found: Tensor = _Exchange.apply(x, self, False)
        return found


class _Exchange(torch.autograd.Function):
    """Exchange in one direction in forward, in the other in backward."""

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
    """Send ``parts[r]`` to rank ``r``, and receive a tensor of the shape ``shapes[r]`` from it."""
    sizes = [prod(shape) for shape in shapes]
    flat = torch.cat([part.reshape(-1) for part in parts])
    received = all_to_all(flat, [part.numel() for part in parts], sizes, group)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
