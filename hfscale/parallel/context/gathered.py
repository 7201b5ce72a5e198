"""Keys and values of all context ranks from one all-gather (Llama Team 2024), and once more in the backward pass."""

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
        """All at once, by rank: ``[b, h, lengths[rank], d]``."""
        widths = [k.shape[-1], v.shape[-1]]
        both = start_all_gather(torch.cat((k, v), -1), self._lengths, 2, self._group).result()
        for rank, block in enumerate(both.split(self._lengths, 2)):
            kb, vb = block.split(widths, -1)
            yield rank, kb, vb

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, Tensor]:
        """A reduce-scatter of what this rank adds to everyone's."""
        widths, sums = [k.shape[-1], v.shape[-1]], []
        for rank, kb, vb in self.blocks(k, v):
            dk, dv = wide_zeros(kb), wide_zeros(vb)
            backward(rank, kb, vb, dk, dv)
            sums.append(torch.cat((dk, dv), -1).to(k.dtype))
        own = start_reduce_scatter(torch.cat(sums, 2), self._lengths, 2, self._group).result()
        dk, dv = own.split(widths, -1)
        return dk, dv
