"""Shard tensor dims over the ranks of mesh axes: index arithmetic, and slicing of tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Spans = list[tuple[int, int]]  # ``(start, stop)`` of intervals along one dim


@dataclass(frozen=True)
class Cut:
    """Describe how tensor dim ``dim`` is sharded over the ``size`` ranks of ``axis``.

    A fused weight consists of several matrices side by side, for example query, key and value. ``parts`` holds their
    lengths along ``dim``, and every rank holds a chunk of *each* part. Empty ``parts`` means that the dim is one part.
    Chunks follow ``torch.chunk``: all chunks have ``ceil(length / chunks)`` entries, except the last ones, which may be
    shorter or empty.

    ``replicas`` gives, for each part, the number of consecutive ranks that hold the same chunk. It must divide
    ``size``: there are ``size // replicas`` chunks, and rank ``r`` holds chunk ``r // replicas``. Empty ``replicas``
    means that every rank holds a different chunk::

        size 4, replicas 2:    rank 0: [a]   rank 1: [a]   rank 2: [b]   rank 3: [b]

    Key/value heads are replicated like this if there are fewer heads than ranks (one head in multi-query attention,
    Shazeer 2019; several in grouped-query attention, Ainslie et al. 2023): a rank holds the head that its queries read.
    """

    axis: str
    dim: int
    size: int
    parts: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()

    @property
    def most_replicas(self) -> int:
        """The largest number of ranks that hold the same chunk of one of the fused matrices; 1 if nothing is
        replicated.
        """
        return max(self.replicas, default=1)

    def spans(self, length: int, rank: int) -> list[tuple[int, int]]:
        """Return ``(start, stop)`` of the chunk that ``rank`` holds of each fused matrix, in a dim of ``length``
        entries.

        A dim without fused matrices counts as one matrix.
        """
        parts = self.parts or (length,)
        result = []
        offset = 0
        for part, replicas in zip(
            parts,
            self.replicas or (1,) * len(parts),
            strict=True,
        ):
            step = -(-part * replicas // self.size)
            chunk = rank // replicas
            result.append(
                (
                    offset + min(chunk * step, part),
                    offset + min((chunk + 1) * step, part),
                )
            )
            offset += part
        return result

    def local_spans(
        self, length: int, rank: int, replicas: Callable[[int], bool]
    ) -> list[tuple[int, int]]:
        """Return where fused matrices lie in the shard of ``rank``: ``(start, stop)`` for each matrix that is held by
        ``n`` ranks with ``replicas(n)`` true.
        """
        spans = self.spans(length, rank)
        result = []
        offset = 0
        for (start, stop), count in zip(
            spans,
            self.replicas or (1,) * len(spans),
            strict=True,
        ):
            if replicas(count):
                result.append((offset, offset + stop - start))
            offset += stop - start
        return result

    def local_length(self, length: int, rank: int) -> int:
        """Return how many of ``length`` entries ``rank`` holds."""
        return sum(stop - start for start, stop in self.spans(length, rank))

    def take(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the shard of a full tensor that ``rank`` holds: a view, or a copy if the tensor has several fused
        matrices.
        """
        spans = self.spans(tensor.shape[self.dim], rank)
        pieces = [tensor.narrow(self.dim, start, stop - start) for start, stop in spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def cut_shape(
    shape: Sequence[int],
    cuts: Sequence[Cut],
    ranks: dict[str, int],
) -> tuple[int, ...]:
    """Return the shape that a rank holds of a tensor of shape ``shape`` after all ``cuts``, in order. ``ranks`` gives
    the rank's index on each axis.
    """
    local = list(shape)
    for cut in cuts:
        local[cut.dim] = cut.local_length(local[cut.dim], ranks.get(cut.axis, 0))
    return tuple(local)


def share_spans(
    shape: Sequence[int],
    cuts: Sequence[Cut],
    ranks: dict[str, int],
) -> list[Spans]:
    """Return, for each dim of a full tensor, the intervals of entries that one rank holds. ``ranks`` gives the rank's
    index on each axis.

    Adjacent intervals are merged.
    """
    spans: list[Spans] = [[(0, size)] for size in shape]
    for cut in cuts:
        length = sum(stop - start for start, stop in spans[cut.dim])
        wanted = cut.spans(length, ranks.get(cut.axis, 0))
        spans[cut.dim] = _joined(
            piece for span in wanted for piece in _spans_between(spans[cut.dim], *span)
        )
    return spans


def _spans_between(
    spans: Spans,
    low: int,
    high: int,
) -> Iterator[tuple[int, int]]:
    """Yield, as intervals of the original dim, the entries ``low`` to ``high`` of a shard that consists of the
    intervals ``spans``.
    """
    offset = 0
    for start, stop in spans:
        first = max(low - offset, 0)
        last = min(high - offset, stop - start)
        if first < last:
            yield start + first, start + last
        offset += stop - start


def _joined(spans: Iterator[tuple[int, int]]) -> Spans:
    result: Spans = []
    for start, stop in spans:
        if result and result[-1][1] == start:
            start = result.pop()[0]
        result.append((start, stop))
    return result


def overlaps(wanted: Spans, held: Spans) -> list[tuple[int, int, int]]:
    """Return the entries that two shards of one dim have in common, as intervals: for each, the offset in shard
    ``wanted``, the offset in shard ``held``, and the length.
    """
    pieces = []
    into = 0
    for first, last in wanted:
        place = 0
        for start, stop in held:
            low = max(first, start)
            high = min(last, stop)
            if low < high:
                pieces.append((into + low - first, place + low - start, high - low))
            place += stop - start
        into += last - first
    return pieces


def narrow_spans(spans: Spans, within: Spans) -> Spans:
    """Return the entries of ``spans`` that a shard with the entries ``within`` holds, as positions in this shard."""
    return [(place, place + length) for _, place, length in overlaps(spans, within)]


def write_share(
    target: Tensor,
    share: Tensor,
    cuts: Sequence[Cut],
    ranks: dict[str, int],
) -> None:
    """Copy one rank's shard into its place in the full tensor ``target``. This is the inverse of sharding by all
    ``cuts``.
    """
    if not cuts:
        target.copy_(share)
        return
    cut, *rest = cuts
    spans = cut.spans(
        target.shape[cut.dim],
        ranks.get(cut.axis, 0),
    )
    if len(spans) == 1 or not rest:
        offset = 0
        for start, stop in spans:
            view = target.narrow(cut.dim, start, stop - start)
            piece = share if len(spans) == 1 else share.narrow(cut.dim, offset, stop - start)
            write_share(view, piece, rest, ranks)
            offset += stop - start
        return
    # Several parts are sharded again by a further cut, which applies to the joined parts: write through a joined copy.
    joined = torch.cat(
        [target.narrow(cut.dim, start, stop - start) for start, stop in spans],
        cut.dim,
    )
    write_share(joined, share, rest, ranks)
    write_share(target, joined, [cut], ranks)


def share_evenly(total: int, size: int) -> list[int]:
    """Return each rank's number of entries if ``total`` entries are divided over ``size`` ranks. Numbers differ by one
    at most; larger numbers come first.
    """
    return [(total + size - 1 - rank) // size for rank in range(size)]
