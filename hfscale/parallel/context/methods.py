"""Run one attention call over context ranks, by the method that the plan or its shapes choose."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...distributed.mesh import Mesh
from ...distributed.process_groups import context_groups
from ...plan.sequence_split import choose, heads_fit
from .attention_override import AttentionCall
from .engine import Reading, Source, attend
from .exchanged_heads import HeadExchange, replicated
from .kernels import kernel_for, padded_width
from .key_sources import GatheredBlocks, OwnBlocks, RingBlocks
from .masks import MaskBlocks


def read(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: MaskBlocks, call: AttentionCall, source: Source
) -> Tensor:
    """Return the attention of ``q`` to all keys of ``source``; heads of queries and of values may differ in width."""
    width = v.shape[-1]
    widest = padded_width(max(q.shape[-1], width), q.device)
    if {q.shape[-1], width} != {widest}:  # zeros add nothing to scores, and are cut off an output
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    if sinks is not None:
        mask = mask.without_idle()  # the sink is what is left to read
    kernel = kernel_for(q, call.scale, call.softcap, call.dropout, mask.idle is not None)
    seed = int(torch.randint(2**31, (), device="cpu")) if call.dropout else 0
    return attend(q.contiguous(), k.contiguous(), v.contiguous(), sinks, Reading(mask, kernel, source, seed))[
        ..., :width
    ]


class ContextAttention:
    """Compute attention over sharded sequences; for ``heads_ring``, groups of ``together`` ranks exchange heads."""

    def __init__(self, method: str, mesh: Mesh, together: int) -> None:
        group = mesh.cp_group
        assert group is not None
        self._method, self._group, self._together = method, group, together
        if method == "heads_ring":
            self._near, self._far = context_groups(mesh, together)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: MaskBlocks, call: AttentionCall
    ) -> Tensor:
        """Compute one attention call; see :data:`hfscale.parallel.context.attention_override.Attend`."""
        split = mask.batch.split
        method = choose(self._method, q.shape[1], k.shape[1], split.size)
        if method == "heads":
            return self._by_heads(q, k, v, mask, call, split.size)
        if method == "heads_ring" and heads_fit(q.shape[1], k.shape[1], self._together):
            return self._by_heads(q, k, v, mask, call, self._together)
        source: Source = GatheredBlocks(split.lengths, self._group)
        if method != "gather":
            source = RingBlocks(split.lengths, mask.batch.rank, self._group)
        return read(q, k, v, call.sinks, mask, call, source)

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskBlocks, call: AttentionCall, size: int) -> Tensor:
        """Exchange tokens for heads in groups of ``size`` ranks, and pass keys around a ring of the groups."""
        together = mask.of_groups(size)
        split, rank = together.batch.split, together.batch.rank
        alone = split.size == 1
        exchange = HeadExchange(split.members(rank), self._group if alone else self._near)
        k, v = replicated(k, size), replicated(v, size)
        q, k, v = (exchange.to_heads(x) for x in (q, k, v))
        sinks = None if call.sinks is None else call.sinks.chunk(size)[exchange.own]
        source: Source = OwnBlocks() if alone else RingBlocks(split.lengths, rank, self._far)
        return exchange.to_tokens(read(q, k, v, sinks, together, call, source))
