"""Ulysses attention (Jacobs et al. 2023): exchange all heads of a rank's tokens for some heads of the full sequence.

::

    [b, h, s/n, d] --all-to-all--> [b, h/n, s, d]      backward: the same exchange the other way

Where there are more ranks than heads, groups of ranks do that with the tokens of their group, and keys and values
travel around a ring of such groups (Fang and Zhao 2024).
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.ops.collectives import all_to_all, apply_mapping


def replicated(x: Tensor, size: int) -> Tensor:
    """Repeat the heads of ``[b, h, s, d]`` until each of ``size`` ranks has one."""
    return x if x.shape[1] >= size else x.repeat_interleave(size // x.shape[1], 1)


class HeadExchange:
    """Differentiable all-to-all between sharding by tokens and sharding by heads; ``members`` holds, for each rank of
    ``group``, the positions of its tokens in the group's tokens.
    """

    def __init__(self, members: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self.members, self.group = list(members), group
        self.order = torch.cat(self.members).argsort()
        self.own = dist.get_rank(group)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange ``[b, h, s of this rank, d]`` for ``[b, h / n, s of all, d]``, in sequence order."""
        return apply_mapping(x, self._to_heads, self._to_tokens)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange ``[b, h / n, s of all, d]`` for ``[b, h, s of this rank, d]``."""
        return apply_mapping(x, self._to_tokens, self._to_heads)

    def _to_heads(self, x: Tensor) -> Tensor:
        b, h, _, d = x.shape
        size = len(self.members)
        shapes = [(b, h // size, len(member), d) for member in self.members]
        received = self._exchanged(list(x.chunk(size, 1)), shapes)
        return torch.cat(received, 2).index_select(2, self.order.to(x.device))

    def _to_tokens(self, x: Tensor) -> Tensor:
        b, h, _, d = x.shape
        parts = [x.index_select(2, member.to(x.device)) for member in self.members]
        return torch.cat(self._exchanged(parts, [(b, h, len(self.members[self.own]), d)] * len(parts)), 1)

    def _exchanged(self, parts: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send ``parts[r]`` to rank ``r``, and return the tensors received, ``shapes[r]`` from rank ``r``."""
        sizes = [prod(shape) for shape in shapes]
        flat = torch.cat([part.reshape(-1) for part in parts])
        received = all_to_all(flat, [part.numel() for part in parts], sizes, self.group)
        return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
