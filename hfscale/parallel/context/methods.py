"""One call of attention over context ranks, by the method that the plan or its shapes choose."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...sequences.attention import read
from ...sequences.engine import OwnBlocks
from ...sequences.masks import MaskBlocks
from ...sequences.seam import AttentionCall
from .gathered import GatheredBlocks
from .heads import fits, heads_of_tokens, replicated, tokens_of_heads
from .ring import RingBlocks


class ContextAttention:
    """What answers the attention of a model whose sequences are cut.

    Args:
        method: one of :data:`hfscale.config.CP_METHODS`.
    """

    def __init__(self, method: str, group: dist.ProcessGroup) -> None:
        self._method, self._group = method, group

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: MaskBlocks, call: AttentionCall
    ) -> Tensor:
        """See :data:`hfscale.sequences.seam.Attend`."""
        split, group = mask.batch.split, self._group
        method = choose(self._method, q.shape[1], k.shape[1], split.size)
        if method == "heads":
            k, v = replicated(k, split.size), replicated(v, split.size)
            q, k, v = (heads_of_tokens(x, split, group) for x in (q, k, v))
            sinks = None if call.sinks is None else call.sinks.chunk(split.size)[dist.get_rank(group)]
            return tokens_of_heads(read(q, k, v, sinks, mask.of_one_rank(), call, OwnBlocks()), split, group)
        ring = method == "ring"
        source: Any = (
            RingBlocks(split.lengths, mask.batch.rank, group) if ring else GatheredBlocks(split.lengths, group)
        )
        return read(q, k, v, call.sinks, mask, call, source)


def choose(method: str, heads: int, key_heads: int, size: int) -> str:
    """What ``auto`` means for one call.

    Per rank and layer, forward and backward, with ``Q`` and ``K`` entries of all queries and of all keys: gathering
    sends ``6 K (n-1)/n``, heads ``4 (Q + K) (n-1)/n^2``, so heads send less from ``n > 2/3 (Q/K + 1)`` on.
    """
    if method != "auto":
        return method
    fewer = size > 2 / 3 * (heads / key_heads + 1)
    return "heads" if fewer and fits(heads, key_heads, size) else "gather"
