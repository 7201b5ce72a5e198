"""Run one attention call over context ranks by the layout's ``cp_method``. ``auto`` chooses a method for each call, and
``heads_ring`` becomes ``ring`` if the numbers of heads do not fit.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import all_to_all, apply_mapping
from ...distributed.process_groups import context_groups
from ...plan.sequence_split import choose, heads_fit
from .attention_override import AttentionCall
from .cut_batch import MaskBlocks
from .engine import GatheredBlocks, OwnBlocks, Reading, RingBlocks, Source, attend
from .kernels import kernel_for, padded_width


class HeadExchange:
    """All-to-all between sharding by tokens and by heads (Jacobs et al. 2023, Ulysses).

    :meth:`to_heads` maps ``[b, h, s/n, d] -> [b, h/n, s, d]``, and :meth:`to_tokens` maps back; each map is the
    gradient of the other. If there are more ranks than heads, groups of ranks exchange heads for the tokens of the
    group, and keys and values travel around a ring of these groups (Fang and Zhao 2024).

    Args:
        members: for each rank of ``group``, the positions of its tokens among the tokens of the group.
        order: the inverse of the concatenated ``members``: it sorts tokens by position.
    """

    def __init__(self, members: Sequence[Tensor], order: Tensor, group: dist.ProcessGroup) -> None:
        self.members = members
        self.order = order
        self.group = group
        self.own = dist.get_rank(group)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange ``[b, h, this rank's tokens, d]`` for ``[b, h / n, all ranks' tokens, d]``, in sequence order, over
        ``n`` ranks.
        """
        b, h, _, d = x.shape
        size = len(self.members)
        shapes = [(b, h // size, len(member), d) for member in self.members]
        received = self._exchanged(list(x.chunk(size, 1)), shapes)
        return torch.cat(received, 2).index_select(2, self.order)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange ``[b, h / n, all ranks' tokens, d]`` for ``[b, h, this rank's tokens, d]``, over ``n`` ranks."""
        b, h, _, d = x.shape
        parts = [x.index_select(2, member) for member in self.members]
        return torch.cat(
            self._exchanged(
                parts,
                [(b, h, len(self.members[self.own]), d)] * len(parts),
            ),
            1,
        )

    def _exchanged(
        self,
        parts: list[Tensor],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        """Send ``parts[r]`` to each rank ``r``; return the received tensors, where the one from rank ``r`` has shape
        ``shapes[r]``.
        """
        sizes = [prod(shape) for shape in shapes]
        flat = torch.cat([part.reshape(-1) for part in parts])
        received = all_to_all(flat, [part.numel() for part in parts], sizes, self.group)
        return [
            part.view(shape)
            for part, shape in zip(
                received.split(sizes),
                shapes,
                strict=True,
            )
        ]


def read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskBlocks,
    call: AttentionCall,
    source: Source,
) -> Tensor:
    """Return the attention of ``q`` to the keys and values of all ranks that ``source`` provides. The head dims of
    queries and values may differ.
    """
    width = v.shape[-1]
    widest = padded_width(max(q.shape[-1], width), q.device)
    # padding zeros do not change scores, and are removed from the output
    if {q.shape[-1], width} != {widest}:
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    if call.sinks is not None:
        mask = mask.without_idle  # a query without keys still reads the sink
    kernel = kernel_for(q, call.scale, call.softcap, call.dropout, mask.idle is not None)
    seed = int(torch.randint(2**31, (), device="cpu")) if call.dropout else 0
    reading = Reading(mask, kernel, source, seed)
    q, k, v = (x.contiguous() for x in (q, k, v))
    return attend(q, k, v, call.sinks, reading)[..., :width]


class ContextAttention:
    """Compute attention over sequences that are sharded over context ranks, by ``method``, a value of ``cp_method``.

    With ``heads_ring``, ranks exchange heads for tokens in groups of ``together`` ranks, and keys and values travel
    around a ring of groups.
    """

    def __init__(self, method: str, mesh: Mesh, together: int) -> None:
        group = mesh.group("cp")
        assert group is not None
        self._method = method
        self._group = group
        self._together = together
        if method == "heads_ring":
            self._near, self._far = context_groups(mesh, mesh.layout.cp, together)

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskBlocks,
        call: AttentionCall,
    ) -> Tensor:
        """Compute one attention call; see :data:`hfscale.parallel.context.attention_override.Attend`."""
        split = mask.batch.split
        method = choose(
            self._method,
            q.shape[1],
            k.shape[1],
            split.size,
        )
        if method == "heads":
            return self._by_heads(q, k, v, mask, call, split.size)
        if method == "heads_ring" and heads_fit(q.shape[1], k.shape[1], self._together):
            return self._by_heads(q, k, v, mask, call, self._together)
        source: Source = GatheredBlocks(split.lengths, self._group)
        if method != "gather":
            source = RingBlocks(split.lengths, mask.batch.rank, self._group)
        return read(q, k, v, mask, call, source)

    def _by_heads(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskBlocks, call: AttentionCall, size: int
    ) -> Tensor:
        """Exchange tokens for heads in groups of ``size`` ranks, and pass keys and values around a ring of groups."""
        together = mask.of_groups(size)
        split = together.batch.split
        rank = together.batch.rank
        alone = split.size == 1
        exchange = HeadExchange(*together.members, self._group if alone else self._near)
        if k.shape[1] < size:  # repeat key/value heads until each rank has one
            k, v = (x.repeat_interleave(size // k.shape[1], 1) for x in (k, v))
        q, k, v = (apply_mapping(x, exchange.to_heads, exchange.to_tokens) for x in (q, k, v))
        if call.sinks is not None:
            call = replace(call, sinks=call.sinks.chunk(size)[exchange.own])
        source: Source = OwnBlocks() if alone else RingBlocks(split.lengths, rank, self._far)
        output = read(q, k, v, together, call, source)
        return apply_mapping(output, exchange.to_tokens, exchange.to_heads)
