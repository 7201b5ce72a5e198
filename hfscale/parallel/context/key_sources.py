"""Sources of blocks of keys and values for :mod:`.engine`: this rank's own, gathered, or passed around a ring.

Gathered (Llama Team 2024), they are gathered once more in the backward pass. In a ring of context ranks (Liu et al.
2023) the next block is in transfer while this one is computed; in the backward pass the gradient of a block follows it
around the ring, and is complete when it returns to its owner.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.ops.collectives import all_gather, apply_mapping, reduce_scatter, waiting
from .cut_batch import CutBatch
from .engine import Backward


def wide_zeros(x: Tensor) -> Tensor:
    """Return zeros of the shape of ``x`` to sum gradients in, in 32 bits at least."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


class OwnBlocks:
    """Provide the keys and values of this rank alone."""

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield this rank's block; see :class:`Source`."""
        yield 0, k, v

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, Tensor]:
        """Return this rank's gradients; see :class:`Source`."""
        dk, dv = wide_zeros(k), wide_zeros(v)
        backward(0, k, v, dk, dv)
        return dk, dv


class GatheredBlocks:
    """Gather blocks of keys and values: see :class:`hfscale.parallel.context.engine.Source`."""

    def __init__(self, lengths: list[int], group: dist.ProcessGroup) -> None:
        self._lengths, self._group = lengths, group

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield ``(rank, keys, values)``, each ``[b, h, lengths[rank], d]``, after one all-gather."""
        widths = [k.shape[-1], v.shape[-1]]
        # As [b, s, h, d] the ranks' shards of one sample are contiguous, so that gathering dim 1 needs no copy.
        own = torch.cat((k.transpose(1, 2), v.transpose(1, 2)), -1)
        both = all_gather(own, self._lengths, 1, self._group)
        del own
        for rank, block in enumerate(both.split(self._lengths, 1)):
            kb, vb = block.transpose(1, 2).split(widths, -1)
            yield rank, kb, vb

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, Tensor]:
        """Reduce-scatter the gradients of all ranks' keys and values to the ranks that own them."""
        widths = [k.shape[-1], v.shape[-1]]
        sums = k.new_empty(k.shape[0], sum(self._lengths), k.shape[1], sum(widths))
        for (rank, kb, vb), place in zip(self.blocks(k, v), sums.split(self._lengths, 1), strict=True):
            dk, dv = wide_zeros(kb), wide_zeros(vb)
            backward(rank, kb, vb, dk, dv)
            torch.cat((dk.to(k.dtype), dv.to(k.dtype)), -1, out=place.transpose(1, 2))
        del kb, vb, dk, dv  # these views would keep the gathered tensors alive
        own = reduce_scatter(sums, self._lengths, 1, self._group)
        dk, dv = own.transpose(1, 2).split(widths, -1)
        return dk, dv


def gather_sequences(x: Tensor, batch: CutBatch, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``[b, own tokens, ...]`` to ``[b, tokens, ...]`` in the sequence's order; reduce-scatter gradients."""
    split = batch.split

    def gather(own: Tensor) -> Tensor:
        return all_gather(own, split.lengths, 1, group).index_select(1, split.order.to(own.device))

    def scatter(grad: Tensor) -> Tensor:
        by_rank = torch.cat([split.places(rank) for rank in range(split.size)]).to(grad.device)
        return reduce_scatter(grad.index_select(1, by_rank), split.lengths, 1, group)

    return apply_mapping(x, gather, scatter)


class RingBlocks:
    """Pass blocks of keys and values around a ring: see :class:`hfscale.parallel.context.engine.Source`."""

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
    """Hold a block being received, and one being sent that must not change until then."""

    def __init__(self, works: list[Any], arriving: Tensor, sent: Tensor, known: AbstractContextManager[None]) -> None:
        self._works, self._arriving, self._sent, self._known = works, arriving, sent, known

    def result(self) -> Tensor:
        with self._known:
            for work in self._works:
                work.wait()
        return self._arriving
