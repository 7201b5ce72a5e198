"""Keys and values that travel around a ring of context ranks, one rank's at a time (Liu et al. 2023).

The next block is under way while this one is computed. Backward, a block's gradient travels behind it and is complete
when it is home.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.waits import waiting
from ...sequences.engine import Backward, wide_zeros


class RingBlocks:
    """A source of blocks: see :class:`hfscale.sequences.engine.Source`."""

    def __init__(self, lengths: list[int], rank: int, group: dist.ProcessGroup) -> None:
        self._lengths, self._rank, self._group = lengths, rank, group

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield ``(rank, k, v)``: this rank's own first, then those of the ranks before it, as the ring passes them."""
        widths, block = [k.shape[-1], v.shape[-1]], torch.cat((k, v), -1)
        for step in range(len(self._lengths)):
            source = (self._rank - step) % len(self._lengths)
            following = self._pass_on(block, source) if step + 1 < len(self._lengths) else None
            kb, vb = block.split(widths, -1)
            yield source, kb, vb
            if following is not None:
                block = following.result()

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, Tensor]:
        """Pass each block's gradient along with it around the ring, every rank adding to it; return this rank's."""
        widths, travelling = [k.shape[-1], v.shape[-1]], None
        for source, kb, vb in self.blocks(k, v):
            dk, dv = wide_zeros(kb), wide_zeros(vb)
            backward(source, kb, vb, dk, dv)
            gradient = torch.cat((dk, dv), -1)
            if travelling is not None:
                gradient += travelling.result().to(gradient.dtype)
            travelling = self._pass_on(gradient.to(k.dtype), source)
        assert travelling is not None
        dk, dv = travelling.result().split(widths, -1)
        return dk, dv

    def _pass_on(self, block: Tensor, source: int) -> "_UnderWay":
        """Send the block of rank ``source`` to the next rank, and receive that of the rank before ``source``."""
        size = len(self._lengths)
        arriving = block.new_empty((*block.shape[:2], self._lengths[(source - 1) % size], block.shape[3]))
        block = block.contiguous()
        after = dist.get_global_rank(self._group, (self._rank + 1) % size)
        before = dist.get_global_rank(self._group, (self._rank - 1) % size)
        send = dist.P2POp(dist.isend, block, after, self._group)
        receive = dist.P2POp(dist.irecv, arriving, before, self._group)
        return _UnderWay(dist.batch_isend_irecv([send, receive]), arriving, block, waiting("recv", before, self._group))


class _UnderWay:
    """A block being received, with the sent one, which must stay unchanged until the send is over."""

    def __init__(self, works: list[Any], arriving: Tensor, sent: Tensor, known: AbstractContextManager[None]) -> None:
        self._works, self._arriving, self._sent, self._known = works, arriving, sent, known

    def result(self) -> Tensor:
        with self._known:
            for work in self._works:
                work.wait()
        return self._arriving
