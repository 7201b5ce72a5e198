"""Hand states of recurrences from context rank to context rank, and their gradients back.

The pieces of a sequence, ``0`` to ``2n - 1``, are scanned in order: up through the ranks' early pieces, and down
through their late ones. A rank of ``n`` computes its own tokens alone, and waits while others compute theirs; it sends
two states forward, and two gradients back. A convolution needs the last inputs before a piece and no state: the ends of
all pieces are gathered at once.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ...plan.sequence_split import Split
from .collectives import apply_mapping, gather_from_sequence_region, waiting


@dataclass(frozen=True)
class RankChain:
    """Carry states between the pieces of sequences, whose ``index`` counts those of this rank."""

    split: Split
    rank: int
    starts: tuple[tuple[int, ...], ...] | None  # where documents begin, by row or once for all
    group: dist.ProcessGroup

    def tails(self, x: Tensor, width: int) -> list[Tensor]:
        """All-gather the last ``width`` inputs of every piece, of ``x [b, d, own tokens]``; return for each piece here
        those before it, ``[b, d, width]``, zeros where they are another document's.
        """
        split, rank = self.split, self.rank
        pieces = [split.pieces(each) for each in range(split.size)]
        kept = [[min(width, stop - start) for start, stop in of_rank] for of_rank in pieces]
        here = x.split([stop - start for start, stop in pieces[rank]], -1)
        ends = [piece[..., piece.shape[-1] - length :] for piece, length in zip(here, kept[rank], strict=True)]
        gathered = gather_from_sequence_region(torch.cat(ends, -1), [sum(each) for each in kept], self.group, dim=-1)
        found = gathered.split([length for of_rank in kept for length in of_rank], -1)
        in_order = [*found[::2], *reversed(found[1::2])]
        return [
            self._before(start, in_order[: self._number(index)], x, width)
            for index, (start, _) in enumerate(pieces[rank])
        ]

    def _before(self, start: int, ends: list[Tensor], x: Tensor, width: int) -> Tensor:
        there = torch.cat([x[..., :0], *ends], -1)
        there = F.pad(there[..., max(0, there.shape[-1] - width) :], (max(0, width - there.shape[-1]), 0))
        if self.starts is None:
            return there
        first = [max((place for place in row if place <= start), default=0) for row in self.starts]
        places = torch.arange(start - width, start, device=x.device)
        other = places < torch.tensor(first, device=x.device)[:, None]
        return there.masked_fill(other[:, None], 0.0)

    def receive(self, index: int, state: Tensor, anchor: Tensor) -> Tensor:
        """Return the state before a piece, with a gradient if ``anchor`` has one; ``state``: that before it here."""
        number = self._number(index)
        if number == 0 or self._owner(number - 1) == self.rank:
            return state
        owner, empty = self._owner(number - 1), torch.empty_like(state, memory_format=torch.contiguous_format)

        def backward(grad: Tensor) -> Any:
            _send(grad, owner, self.group)

        return apply_mapping(anchor, lambda _: _receive(empty, owner, self.group), backward)

    def send(self, index: int, state: Tensor) -> Tensor | None:
        """Send the state after a piece to the rank of the next one, if that is another; the output must depend on what
        is returned (:func:`.segments.tied`) for the gradient to be received.
        """
        number = self._number(index) + 1
        if number == 2 * self.split.size or self._owner(number) == self.rank:
            return None
        owner, like = self._owner(number), torch.empty_like(state, device="meta")

        def forward(state: Tensor) -> Tensor:
            _send(state, owner, self.group)
            return state.new_zeros(())

        def backward(grad: Tensor) -> Tensor:
            return _receive(torch.empty(like.shape, dtype=like.dtype, device=grad.device), owner, self.group)

        return apply_mapping(state, forward, backward)

    def _number(self, index: int) -> int:
        """Return the place among all pieces of this rank's early (0) or late (1) one."""
        return self.rank if index == 0 else 2 * self.split.size - 1 - self.rank

    def _owner(self, number: int) -> int:
        return min(number, 2 * self.split.size - 1 - number)


def _send(x: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    peer = dist.get_global_rank(group, rank)
    with waiting("send", peer, group):
        dist.send(x.contiguous(), peer, group=group)


def _receive(x: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
    peer = dist.get_global_rank(group, rank)
    with waiting("recv", peer, group):
        dist.recv(x, peer, group=group)
    return x
