"""Compute attention of a rank's queries to all ranks' keys, block by block (Liu et al. 2023; Dao et al. 2022).

::

    own q [b, h, s/n, d] --per block of keys--> output, log-sum-exp --merged by log-sum-exps--> output over all keys
    blocks of k, v come from a source: all-gathered, passed around a ring, or this rank's own

Saved for the backward pass are this rank's q, k, v, output and log-sum-exp. In the backward pass the source provides
the blocks of k and v once more, and returns their gradients to the ranks that computed k and v. A rank's tokens are a
few intervals of the sequence. The mask is evaluated for one pair of intervals (of queries and of keys) at a time; for a
causal mask no mask tensor is ever allocated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.ops.collectives import all_gather, apply_mapping, reduce_scatter, waiting
from ...plan.sequence_split import Interval
from .cut_batch import CAUSAL, MASKED, SKIPPED, CutBatch, MaskBlocks
from .kernels import Kernel, ScoreBlock, finite, joined

Backward = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Type of the function that runs the backward pass over one rank's keys and values.

``(rank, k, v)``: a context rank, and its keys and values. Returned are this rank's terms of the gradients of ``k`` and
``v``, summed in at least 32 bits.
"""


class Source(Protocol):
    """Provide the keys and values of all context ranks to attention, one block per rank; implementations differ in how
    ranks communicate. Keys and values have equal shapes.
    """

    def blocks(
        self,
        k: Tensor,
        v: Tensor,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield ``(rank, k, v)`` of every rank, ``[b, h, tokens, d]``, given this rank's k and v; collective."""

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's k and v, summed over all ranks' queries; collective."""


@dataclass(frozen=True)
class Reading:
    """Hold what one attention call reads: the mask, the attention kernel, and the source of the ranks'
    keys and values.
    """

    mask: MaskBlocks
    kernel: Kernel
    source: Source
    seed: int = 0  # seed of dropout, from which the seed of each pair of intervals is derived

    def pieces(self, x: Tensor, rank: int | None = None) -> Sequence[Tensor]:
        """Split ``x [b, h, tokens, ...]``, the tokens of ``rank`` (default: this rank), into the rank's intervals."""
        batch = self.mask.batch
        intervals = batch.split.pieces(batch.rank if rank is None else rank)
        return x.split([stop - start for start, stop in intervals], 2)

    def pairs(self, rank: int) -> Iterator[tuple[int, Interval, int, Interval]]:
        """Yield, for every interval of this rank's queries and every interval of the keys of ``rank``, ``(i, rows, j,
        columns)``: the index of the query interval, the interval, the index of the key interval, the interval.

        Pairs of intervals in which no query reads a key are left out.
        """
        batch = self.mask.batch
        for i, rows in enumerate(batch.split.pieces(batch.rank)):
            for j, columns in enumerate(batch.split.pieces(rank)):
                if self.mask.kind(rows, columns) != SKIPPED:
                    yield i, rows, j, columns

    def block(self, rows: Interval, columns: Interval, dtype: torch.dtype) -> ScoreBlock:
        """Return how the queries of interval ``rows`` read the keys of ``columns``: mask, bias and dropout seed."""
        kind = self.mask.kind(rows, columns)
        idle = None if self.mask.idle is None else self.mask.idle[:, None, slice(*rows)]
        seed = (self.seed * 1_000_003 + rows[0]) * 1_000_003 + columns[0]
        bias = self.mask.bias(rows, columns, dtype) if kind == MASKED else None
        return ScoreBlock(kind == CAUSAL, bias, seed % 2**63, idle)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    reading: Reading,
) -> Tensor:
    """Return the attention output ``[b, h, s, d]`` of this rank's queries over all ranks' keys, given this rank's keys
    and values. ``sinks [h]`` are the logits of a key that every query reads and that has no value (Xiao et al. 2024).
    """
    out: Tensor = _Attention.apply(q, k, v, sinks, reading)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, reading: Reading
    ) -> Tensor:
        queries = reading.pieces(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        merged = dict[int, tuple[Tensor, Tensor]]()
        for rank, kb, vb in reading.source.blocks(k, v):
            keys = reading.pieces(kb, rank)
            values = reading.pieces(vb, rank)
            for i, rows, j, columns in reading.pairs(rank):
                block = reading.block(rows, columns, q.dtype)
                part = reading.kernel.forward(queries[i], keys[j], values[j], block)
                merged[i] = _merged(*merged[i], *part) if i in merged else part
        for i in set(range(len(queries))) - set(merged):  # intervals of queries that read no key
            out = torch.zeros_like(queries[i])
            merged[i] = (
                out,
                out.new_full(out.shape[:3], float("-inf"), dtype=wide),
            )
        outs, norms = zip(*(merged[i] for i in range(len(queries))), strict=True)
        total = joined(outs)
        norm = joined(norms).to(wide)
        if sinks is not None:
            total, norm = _merged(
                total, norm, torch.zeros_like(total), sinks.to(wide)[None, :, None].expand_as(norm)
            )
        # Contiguous as [b, s, h, d], the order in which the output projection reads it.
        result = total.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, sinks, result, norm)
        ctx.reading = reading
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        reading: Reading = ctx.reading
        queries, grad, outs, norms = (
            reading.pieces(x.contiguous()) for x in (q, grads[0], out, finite(lse))
        )
        dq = dict[int, Tensor]()

        def add(rank: int, kb: Tensor, vb: Tensor) -> tuple[Tensor, Tensor]:
            keys = reading.pieces(kb, rank)
            values = reading.pieces(vb, rank)
            dk = dict[int, Tensor]()
            dv = dict[int, Tensor]()
            for i, rows, j, columns in reading.pairs(rank):
                block = reading.block(rows, columns, q.dtype)
                gradients = reading.kernel.backward(
                    grad[i], queries[i], keys[j], values[j], outs[i], norms[i], block
                )
                for sums, place, part in zip(
                    (dq, dk, dv),
                    (i, j, j),
                    gradients,
                    strict=True,
                ):
                    sums[place] = sums[place].to(lse.dtype).add_(part) if place in sums else part
            return _in_order(dk, keys), _in_order(dv, values)

        dk, dv = reading.source.gradients(k, v, add)
        dsinks = None
        if sinks is not None:
            delta = (grads[0].to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            read = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
            dsinks = -(read * delta).sum((0, 2)).to(sinks.dtype)
        return (
            _in_order(dq, queries).to(q.dtype),
            dk.to(k.dtype),
            dv.to(v.dtype),
            dsinks,
            None,
        )


def _merged(
    out: Tensor,
    lse: Tensor,
    other: Tensor,
    other_lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merge the outputs of attention over two sets of keys, weighted by log-sum-exps (Milakov and Gimelshein 2018)."""
    total = torch.logaddexp(lse, other_lse.to(lse.dtype))
    known = finite(total)
    share, other_share = (torch.exp(norm - known)[..., None] for norm in (lse, other_lse))
    return out * share + other.to(out.dtype) * other_share, total


def _in_order(sums: dict[int, Tensor], pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate the gradients of a tensor's intervals of tokens: ``sums[i]`` for ``pieces[i]``, or zeros if it has
    none.
    """
    return joined(
        [sums[i] if i in sums else torch.zeros_like(piece) for i, piece in enumerate(pieces)]
    )


class OwnBlocks:
    """Provide only this rank's keys and values, for attention without communication; a :class:`Source`."""

    def blocks(
        self,
        k: Tensor,
        v: Tensor,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield this rank's keys and values as the only block: ``(0, k, v)``."""
        yield 0, k, v

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values for this rank's queries; see :class:`Source`."""
        return backward(0, k, v)


class GatheredBlocks:
    """All-gather keys and values in the forward pass and again in the backward pass (Llama Team 2024); a ``Source``."""

    def __init__(self, lengths: list[int], group: dist.ProcessGroup) -> None:
        self._lengths = lengths
        self._group = group

    def blocks(
        self,
        k: Tensor,
        v: Tensor,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield ``(rank, keys, values)``, each ``[b, h, lengths[rank], d]``, after one all-gather."""
        # In the layout [b, s, h, d] a rank's tokens of one sample are contiguous, so all-gathering dim 1 needs no copy.
        own = torch.cat(
            (k.transpose(1, 2), v.transpose(1, 2)),
            -1,
        )
        both = all_gather(own, self._lengths, 1, self._group)
        del own
        for rank, block in enumerate(both.split(self._lengths, 1)):
            kb, vb = block.transpose(1, 2).chunk(2, -1)
            yield rank, kb, vb

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, Tensor]:
        """Reduce-scatter the gradients of all ranks' keys and values to the ranks that computed the keys and values."""
        sums = k.new_empty(k.shape[0], sum(self._lengths), k.shape[1], 2 * k.shape[-1])
        for (rank, kb, vb), place in zip(
            self.blocks(k, v), sums.split(self._lengths, 1), strict=True
        ):
            dk, dv = backward(rank, kb, vb)
            torch.cat(
                (dk.to(k.dtype), dv.to(k.dtype)),
                -1,
                out=place.transpose(1, 2),
            )
        del kb, vb, dk, dv  # these views would keep the gathered tensors alive
        own = reduce_scatter(sums, self._lengths, 1, self._group)
        dk, dv = own.transpose(1, 2).chunk(2, -1)
        return dk, dv


def gather_sequences(x: Tensor, batch: CutBatch, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``[b, own tokens, ...]`` to ``[b, tokens, ...]`` in the sequence's order; backward: reduce-scatter."""
    split = batch.split

    def gather(own: Tensor) -> Tensor:
        return all_gather(own, split.lengths, 1, group).index_select(1, split.order(own.device))

    def scatter(grad: Tensor) -> Tensor:
        return reduce_scatter(
            grad.index_select(1, split.side_by_side(grad.device)), split.lengths, 1, group
        )

    return apply_mapping(x, gather, scatter)


class RingBlocks:
    """Pass blocks of keys and values around a ring of context ranks (Liu et al. 2023); a :class:`Source`.

    The next block is in transfer while the current block is computed. In the backward pass the gradient of a block
    travels around the ring after the block, and is complete when it arrives at the rank that computed the block.
    """

    def __init__(self, lengths: list[int], rank: int, group: dist.ProcessGroup) -> None:
        self._lengths = lengths
        self._rank = rank
        self._group = group

    def blocks(
        self,
        k: Tensor,
        v: Tensor,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield ``(rank, keys, values)``: first this rank's block, then the blocks of preceding ranks in the ring."""
        block = torch.cat((k, v), -1)
        for step in range(len(self._lengths)):
            source = (self._rank - step) % len(self._lengths)
            following = self._pass_on(block, source) if step + 1 < len(self._lengths) else None
            kb, vb = block.chunk(2, -1)
            yield source, kb, vb
            if following is not None:
                block = following()

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> tuple[Tensor, Tensor]:
        """Pass each block's gradient around the ring, adding every rank's contribution."""
        travelling = None
        for source, kb, vb in self.blocks(k, v):
            gradient = torch.cat(backward(source, kb, vb), -1)
            if travelling is not None:
                gradient += travelling().to(gradient.dtype)
            travelling = self._pass_on(gradient.to(k.dtype), source)
        assert travelling is not None
        dk, dv = travelling().chunk(2, -1)
        return dk, dv

    def _pass_on(self, block: Tensor, source: int) -> Callable[[], Tensor]:
        """Send the block of rank ``source`` to the next rank, and start to receive the preceding rank's block. Return a
        function that waits for the received block and returns it.
        """
        size = len(self._lengths)
        arriving = block.new_empty(
            (*block.shape[:2], self._lengths[(source - 1) % size], block.shape[3])
        )
        block = block.contiguous()
        after = dist.get_global_rank(self._group, (self._rank + 1) % size)
        before = dist.get_global_rank(self._group, (self._rank - 1) % size)
        send = dist.P2POp(dist.isend, block, after, self._group)
        receive = dist.P2POp(dist.irecv, arriving, before, self._group)
        works = dist.batch_isend_irecv([send, receive])
        return partial(_arrived, works, arriving, block, waiting("recv", before, self._group))


def _arrived(
    works: list[Any], arriving: Tensor, _sent: Tensor, known: AbstractContextManager[None]
) -> Tensor:
    """Wait for a received block. ``_sent`` keeps the sent block alive until the transfer is complete."""
    with known:
        for work in works:
            work.wait()
    return arriving
