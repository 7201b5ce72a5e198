"""Keep this rank's share of a weight in the bytes that its checkpoint stores: nothing is quantized again.

A share is a few boxes of stored matrices, and a box of a stored matrix is a box of each of its parts (values, scales,
zero points), grown to the blocks that it touches (:mod:`.dequantized`). Their words, one after the other, are a row of
bytes, one per data rank (:mod:`..ops.packed_weights`). Equal boxes of many matrices - a projection of every expert -
lie together, so that they are unpacked together::

    row of a rank with two experts:   [gate values 0, 1 | gate scales 0, 1 | up values 0, 1 | up scales 0, 1]

What is unpacked are the values that a plain load would have read, by the same functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import ceil, lcm, prod
from typing import Any

import torch
from torch import Tensor

from ...plan import ParameterPlan
from ...plan.cut import Spans, overlaps, share_spans
from ..ops.packed_weights import Packing, as_bytes
from .dequantized import Along, Arithmetic, Box, DequantizedOnDisk, StoredPart, WordsInMemory

_ALIGNED = 8
"""Bytes; the words of a part begin at a multiple."""

Source = tuple[DequantizedOnDisk, Spans]
"""A stored weight, and its box in the parameter: ``(start, stop)`` per dim."""


@dataclass(frozen=True)
class KeptPart:
    """The words of one stored tensor for a box of a matrix.

    Attributes:
        origin: the row and column of the first word.
        shape: how many rows and columns.
        rows, columns: how the tensor runs along the matrix.
    """

    dtype: torch.dtype
    origin: tuple[int, int]
    shape: tuple[int, int]
    rows: Along
    columns: Along

    @property
    def size(self) -> int:
        """The bytes of one matrix."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class KeptBlock:
    """Equal boxes of ``at[0]`` matrices, of which the words of each part lie one after the other.

    Attributes:
        parts: by name in the arithmetic.
        transposed: whether the stored matrices are the weight's transposed.
        spans: rows and columns in each matrix; what is in front of them is left out, by whole blocks.
        at: matrices, rows and columns in the shard.
    """

    parts: tuple[tuple[str, KeptPart], ...]
    arithmetic: Arithmetic
    transposed: bool
    spans: Box
    at: Box

    def places(self) -> Iterator[tuple[str, KeptPart, int]]:
        """Yield the name of each part, the part, and its first byte in the block."""
        (first, last), offset = self.at[0], 0
        for name, part in self.parts:
            yield name, part, offset
            offset += _aligned((last - first) * part.size)

    @property
    def size(self) -> int:
        """The bytes of the block in a row."""
        (first, last), *_ = self.at
        return sum(_aligned((last - first) * part.size) for _, part in self.parts)

    def unpack_into(self, rows: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        """Write the values, computed in ``dtype``, of bytes ``rows [shards, size]`` into ``out [shards, matrices, rows,
        columns]``.
        """
        lead = out.shape[:2]
        parts = {}
        for name, part, offset in self.places():
            found = rows[:, offset : offset + lead[1] * part.size].contiguous()
            found = found.clone() if found.storage_offset() % _ALIGNED else found
            words = WordsInMemory(found.view(part.dtype).view(*lead, *part.shape), part.origin)
            parts[name] = StoredPart(words, part.rows, part.columns)
        weight = DequantizedOnDisk(tuple(out.shape), parts, self.arithmetic, self.transposed)
        weight.load_as(dtype, False)
        weight.read_into(((0, lead[0]), (0, lead[1]), *self.spans), out)


@dataclass(frozen=True)
class KeptShard:
    """One data rank's shard: its span of the gathered weight, and its blocks."""

    span: tuple[int, int]
    blocks: tuple[KeptBlock, ...]


@dataclass(frozen=True)
class StoredPacking(Packing):
    """How to read a weight in the bytes of its checkpoint.

    Attributes:
        dim: the dim of ``shape`` that data ranks shard.
        shards: of each data rank.
    """

    dim: int
    shards: tuple[KeptShard, ...]

    @property
    def row_shape(self) -> tuple[int, int]:
        """The shape of the gathered bytes; the row of a smaller shard is filled up."""
        return len(self.shards), max(sum(block.size for block in shard.blocks) for shard in self.shards)

    def unpack(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values ``[matrices, rows, columns]`` of the gathered bytes; equal shards are unpacked together."""
        plain = as_bytes(rows)
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=plain.device)
        first = 0
        for blocks, alike in groupby(self.shards, key=lambda shard: shard.blocks):
            shards = list(alike)
            (start, stop), count = shards[0].span, len(shards)
            target = out.narrow(self.dim, start, count * (stop - start)).unflatten(self.dim, (count, stop - start))
            offset = 0
            for block in blocks:
                place = tuple(slice(*span) for span in block.at)
                block_bytes = plain[first : first + count, offset : offset + block.size]
                block.unpack_into(block_bytes, target.movedim(self.dim, 0)[(slice(None), *place)], self.dtype)
                offset += block.size
            first += count
        return out


@dataclass(frozen=True)
class _Piece:
    """A box of one stored matrix, and where it is in the shard: ``at`` without the matrix."""

    weight: DequantizedOnDisk
    spans: Box  # of the weight, with the matrix if it has several
    matrix: int
    at: Box

    @property
    def as_stored(self) -> Box:
        *lead, rows, columns = self.spans
        return (*lead, columns, rows) if self.weight.transposed else self.spans

    def block(self) -> KeptBlock:
        """Return the description of this piece alone, which equal pieces of other matrices share."""
        stored, named = self.as_stored[-2:], self.weight.parts.items()
        units = [lcm(*(getattr(part, along).entries for _, part in named)) for along in ("rows", "columns")]
        skipped = [start - start % unit for (start, _), unit in zip(stored, units, strict=True)]
        parts = []
        for name, part in named:
            (top, bottom), (left, right) = part.box(self.as_stored)[-2:]
            before = [skip // a.entries * a.words for skip, a in zip(skipped, (part.rows, part.columns), strict=True)]
            origin, shape = (top - before[0], left - before[1]), (bottom - top, right - left)
            parts.append((name, KeptPart(part.source.dtype, origin, shape, part.rows, part.columns)))
        if self.weight.transposed:
            skipped.reverse()
        spans = tuple((a - skip, b - skip) for (a, b), skip in zip(self.spans[-2:], skipped, strict=True))
        arithmetic = self.weight.arithmetic_if(self.weight.merged)
        return KeptBlock(tuple(parts), arithmetic, self.weight.transposed, spans, ((0, 1), *self.at))


class StoredRow:
    """A rank's row of the packed bytes of a weight, read when it is indexed.

    Args:
        planned: the weight, of two dims or three.
        sources: the stored weights that make it up.
        ranks: the rank's coordinates.

    Attributes:
        packing: how to read the rows of all data ranks.
    """

    def __init__(self, planned: ParameterPlan, sources: Sequence[Source], ranks: Mapping[str, int]) -> None:
        shape, missing = planned.model_shape(dict(ranks)), 3 - len(planned.shape)
        axis, dim, count = next(((cut.axis, cut.dim, cut.size) for cut in planned.data_cuts), ("", 0, 1))
        shards, own = [], list[tuple[KeptBlock, list[_Piece]]]()
        for shard in range(count):
            spans = share_spans(planned.shape, planned.cuts, {**ranks, axis: shard})
            found = _grouped(_pieces(sources, [[(0, 1)]] * missing + spans))
            step = ceil(shape[dim] / count)
            edges = min(shard * step, shape[dim]), min((shard + 1) * step, shape[dim])
            shards.append(KeptShard(edges, tuple(block for block, _ in found)))
            if shard == ranks.get(axis, 0):
                own = found
        whole = (*(1,) * missing, *shape)
        self.packing = StoredPacking(
            (whole[0], whole[1], whole[2]), sources[0][0].dtype, None, dim + missing, tuple(shards)
        )
        self._own, self.shape = own, (1, self.packing.row_shape[1])

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return "U8"

    def __getitem__(self, index: Any) -> Tensor:
        row = torch.zeros(self.shape, dtype=torch.uint8)
        begin = 0
        for block, pieces in self._own:
            for name, kept, offset in block.places():
                for number, piece in enumerate(pieces):
                    part = piece.weight.parts[name]
                    words = part.source.read(part.box(piece.as_stored)).contiguous()
                    start = begin + offset + number * kept.size
                    row[0, start : start + kept.size] = words.view(torch.uint8).flatten()
            begin += block.size
        return row[index]


def _pieces(sources: Sequence[Source], spans: Sequence[Spans]) -> Iterator[_Piece]:
    """Yield the pieces of ``sources`` in the shard ``spans`` of a parameter, of three dims."""
    for weight, box in sources:
        edges = [(0, 1)] * (3 - len(box)) + list(box)
        hits = [overlaps([edge], within) for edge, within in zip(edges, spans, strict=True)]
        for (matrix, place, count), *inner in product(*hits):
            inside = tuple((start, start + length) for start, _, length in inner)
            at = tuple((start, start + length) for _, start, length in inner)
            for number in range(count):
                lead = ((matrix + number, matrix + number + 1),) if len(weight.shape) > 2 else ()
                yield _Piece(weight, (*lead, *inside), place + number, at)


def _grouped(pieces: Iterator[_Piece]) -> list[tuple[KeptBlock, list[_Piece]]]:
    """Return the blocks of a shard, each with its pieces: consecutive matrices with equal boxes."""
    found = list[tuple[KeptBlock, list[_Piece]]]()
    for piece in sorted(pieces, key=lambda piece: (piece.at, piece.matrix)):
        alone = piece.block()
        if found and found[-1][0] == alone and found[-1][1][-1].matrix + 1 == piece.matrix:
            found[-1][1].append(piece)
        else:
            found.append((alone, [piece]))
    return [(_of_matrices(block, held), held) for block, held in found]


def _of_matrices(block: KeptBlock, held: list[_Piece]) -> KeptBlock:
    at = ((held[0].matrix, held[-1].matrix + 1), *block.at[1:])
    return KeptBlock(block.parts, block.arithmetic, block.transposed, block.spans, at)


def _aligned(size: int) -> int:
    return ceil(size / _ALIGNED) * _ALIGNED
