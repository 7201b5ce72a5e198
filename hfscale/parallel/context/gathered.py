"""All-gather context parallelism (Llama Team 2024): keys and values are gathered, and again in the backward pass."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.exchange import start_all_gather, start_reduce_scatter
from ...sequences.engine import Backward, wide_zeros


class GatheredBlocks:
    """A source of blocks: see :class:`hfscale.sequences.engine.Source`."""

    def __init__(self, lengths: list[int], group: dist.ProcessGroup) -> None:
        self._lengths, self._group = lengths, group

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """All-gather keys and values, then yield ``(rank, k, v)`` of every rank, ``[b, h, lengths[rank], d]`` each."""
        widths = [k.shape[-1], v.shape[-1]]
        # As [b, s, h, d] the ranks' shards of one sample are contiguous, so that gathering dim 1 needs no copy.
        own = torch.cat((k.transpose(1, 2), v.transpose(1, 2)), -1)
        both = start_all_gather(own, self._lengths, 1, self._group).result()
        del own
        for rank, block in enumerate(both.split(self._lengths, 1)):
            kb, vb = block.transpose(1, 2).split(widths, -1)
            yield rank, kb, vb

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, Tensor]:
        """Reduce-scatter this rank's gradients of all keys and values; return the sums for its own ``k`` and ``v``."""
        widths = [k.shape[-1], v.shape[-1]]
        sums = k.new_empty(k.shape[0], sum(self._lengths), k.shape[1], sum(widths))
        for (rank, kb, vb), place in zip(self.blocks(k, v), sums.split(self._lengths, 1), strict=True):
            dk, dv = wide_zeros(kb), wide_zeros(vb)
            backward(rank, kb, vb, dk, dv)
            torch.cat((dk.to(k.dtype), dv.to(k.dtype)), -1, out=place.transpose(1, 2))
        del kb, vb, dk, dv  # these views would keep the gathered tensors alive
        own = start_reduce_scatter(sums, self._lengths, 1, self._group).result()
        dk, dv = own.transpose(1, 2).split(widths, -1)
        return dk, dv
