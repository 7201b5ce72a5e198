"""Pass keys and values around a ring of context ranks (Liu et al. 2023).

The next block is in transfer while this one is computed. In the backward pass the gradient of a block follows it around
the ring, and is complete when it returns to its owner.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.ops.waits import waiting
from .engine import Backward, wide_zeros


class RingBlocks:
    """A source of blocks: see :class:`hfscale.parallel.context.engine.Source`."""

    def __init__(self, lengths: list[int], rank: int, group: dist.ProcessGroup) -> None:
        self._lengths, self._rank, self._group = lengths, rank, group

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield ``(rank, keys, values)``: this rank's own first, then those of the preceding ranks."""
        widths, block = [k.shape[-1], v.shape[-1]], torch.cat((k, v), -1)
        for step in range(len(self._lengths)):
            source = (self._rank - step) % len(self._lengths)
            following = self._pass_on(block, source) if step + 1 < len(self._lengths) else None
            kb, vb = block.split(widths, -1)
            yield source, kb, vb
            if following is not None:
                block = following.result()

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, Tensor]:
        """Pass each block's gradient around the ring, adding every rank's contribution."""
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
        """Start to send the block of rank ``source`` to the next rank, and to receive that of the rank before
        ``source``.
        """
        size = len(self._lengths)
        arriving = block.new_empty((*block.shape[:2], self._lengths[(source - 1) % size], block.shape[3]))
        block = block.contiguous()
        after = dist.get_global_rank(self._group, (self._rank + 1) % size)
        before = dist.get_global_rank(self._group, (self._rank - 1) % size)
        send = dist.P2POp(dist.isend, block, after, self._group)
        receive = dist.P2POp(dist.irecv, arriving, before, self._group)
        return _UnderWay(dist.batch_isend_irecv([send, receive]), arriving, block, waiting("recv", before, self._group))


class _UnderWay:
    """Hold a block being received, and one being sent that must not change until then."""

    def __init__(self, works: list[Any], arriving: Tensor, sent: Tensor, known: AbstractContextManager[None]) -> None:
        self._works, self._arriving, self._sent, self._known = works, arriving, sent, known

    def result(self) -> Tensor:
        with self._known:
            for work in self._works:
                work.wait()
        return self._arriving
