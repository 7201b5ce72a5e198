"""All-gather the tokens of a sequence on every context rank, for mixers other than attention."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.ops.exchange import start_all_gather, start_reduce_scatter
from ...plan.sequence_split import Split
from .cut_batch import CutBatch


class TokenGather:
    """See :data:`hfscale.parallel.context.mixers.Gather`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, x: Tensor, batch: CutBatch) -> Tensor:
        """All-gather ``[b, own tokens, ...]`` to ``[b, tokens, ...]``."""
        found: Tensor = _GatherSequences.apply(x, batch.split, self._group)
        return found


class _GatherSequences(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = split, group
        side_by_side = start_all_gather(x, split.lengths, 1, group).result()
        return side_by_side.index_select(1, split.order.to(x.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        split, group = ctx.arguments
        by_rank = torch.cat([split.places(rank) for rank in range(split.size)]).to(grads[0].device)
        return start_reduce_scatter(grads[0].index_select(1, by_rank), split.lengths, 1, group).result(), None, None
