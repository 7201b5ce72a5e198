"""Keep this rank's shard of a quantized weight as the bytes that its checkpoint stores: nothing is quantized again.

A shard may consist of rows and columns of several stored matrices, such as the experts' projections. Of each matrix,
the box that belongs to the shard is read from every stored tensor (values, scales, zero points), enlarged to the
quantization blocks that it touches (:mod:`hfscale.distributed.files.dequantized`). The bytes of all boxes, one after
the other, are this data rank's row of bytes, and the rows of all data ranks can be all-gathered
(:mod:`hfscale.distributed.ops.quantized_weights`). Boxes that are equal in many matrices, such as one projection of
every expert, are stored and decoded together. Decoding uses the functions that dequantize weights at loading, so the
values are the same::

    row of a rank with two experts:   [gate values 0, 1 | gate scales 0, 1 | up values 0, 1 | up scales 0, 1]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import ceil, lcm, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...distributed.files.dequantized import (
    Along,
    Arithmetic,
    DequantizedOnDisk,
    StoredPart,
    WordsInMemory,
)
from ...distributed.files.reader import Box, box_slices
from ...distributed.ops.grouped_linear import frozen_linear
from ...distributed.ops.quantized_weights import (
    Encoding,
    as_bytes,
    read_quantized,
    register_quantized,
)
from ...distributed.ops.shared_casts import autocasted
from ...plan import ParameterPlan
from ...plan.cut import Cut, Spans, overlaps, share_spans
from ...train.runtime.parameter_names import owner_of

_ALIGNED = 8  # bytes; the words of a part begin at a multiple of this

# A stored weight, and the box of the parameter that the weight fills: ``(start, stop)`` per dim.
Source = tuple[DequantizedOnDisk, Spans]


@dataclass(frozen=True)
class KeptPart:
    """Describe what one stored tensor (values, scales ...) contributes to a shard of a matrix: the box of its elements,
    and how they belong to rows and columns.
    """

    name: str  # the tensor's name as an argument of the arithmetic
    dtype: torch.dtype  # dtype of the words
    origin: tuple[int, ...]  # the index of the first word, with the blocks before the box left out
    shape: tuple[int, ...]  # shape of the words
    rows: Along  # how words belong to the rows of the weight
    columns: Along  # how words belong to the columns of the weight


@dataclass(frozen=True)
class KeptBlock:
    """Describe equal boxes of several quantized matrices that are stored together: of each stored tensor (values,
    scales ...), the bytes of all matrices are contiguous.
    """

    parts: tuple[KeptPart, ...]  # one per stored tensor
    arithmetic: Arithmetic  # computes values from the words
    transposed: bool  # whether the stored matrices are transposes of the weight's matrices
    spans: Box  # rows and columns of the boxes, as stored, counted from the first kept quantization block
    at: Box  # the matrices, rows and columns of the shard that the boxes fill

    def places(self) -> list[tuple[KeptPart, int, int]]:
        """Return, for each stored tensor (values, scales ...), its description, the offset of its first byte in this
        block of bytes, and its number of bytes per matrix.
        """
        (first, last), begin, found = self.at[0], 0, []
        for part in self.parts:
            size = prod(part.shape) * part.dtype.itemsize
            found.append((part, begin, size))
            begin += ceil((last - first) * size / _ALIGNED) * _ALIGNED
        return found

    @property
    def size(self) -> int:
        """The number of bytes that all boxes take together, with padding."""
        (_, begin, size), (first, last) = self.places()[-1], self.at[0]
        return begin + ceil((last - first) * size / _ALIGNED) * _ALIGNED

    def decode_into(self, rows: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        """Dequantize the bytes ``rows [shards, size]`` of several shards with equal boxes to ``dtype``, and write the
        values to ``out [shards, matrices, rows, columns]``.
        """
        shards, matrices = out.shape[:2]
        parts = {}
        for part, begin, size in self.places():
            found = rows[:, begin : begin + matrices * size].contiguous()
            found = found.clone() if found.storage_offset() % _ALIGNED else found
            words = WordsInMemory(
                found.view(part.dtype).view(shards, matrices, *part.shape), part.origin
            )
            parts[part.name] = StoredPart(words, part.rows, part.columns)
        weight = DequantizedOnDisk((), parts, self.arithmetic)
        weight.dtype = dtype
        out = out.transpose(-1, -2) if self.transposed else out
        weight.read_stored(((0, shards), (0, matrices), *self.spans), out)


@dataclass(frozen=True)
class StoredEncoding(Encoding):
    """Describe how a weight is decoded from bytes that were kept as its quantized checkpoint stores them."""

    dim: int  # the dim of ``shape`` that is sharded over data ranks
    # for each data rank the ``(start, stop)`` of its shard along ``dim``, and the blocks of its row
    shards: tuple[tuple[tuple[int, int], tuple[KeptBlock, ...]], ...]

    @property
    def row_shape(self) -> tuple[int, int]:
        """The shape of the weight's bytes after an all-gather: one row per data rank, padded to the longest row."""
        return len(self.shards), max(
            sum(block.size for block in blocks) for _, blocks in self.shards
        )

    def decode(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values ``[matrices, rows, columns]`` of the full weight, given the bytes of all data ranks (one
        row per rank); shards that are stored equally are decoded together.
        """
        plain = as_bytes(rows)
        first = 0
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=plain.device)
        for blocks, alike in groupby(self.shards, key=lambda shard: shard[1]):
            spans = [span for span, _ in alike]
            (start, stop), count, begin = spans[0], len(spans), 0
            part = out.narrow(self.dim, start, count * (stop - start)).unflatten(
                self.dim, (count, stop - start)
            )
            for block in blocks:
                place = (slice(None), *box_slices(block.at))
                held = plain[first : first + count, begin : begin + block.size]
                block.decode_into(held, part.movedim(self.dim, 0)[place], self.dtype)
                begin += block.size
            first += count
        return out


class _Piece(NamedTuple):
    """Describe the box of one stored matrix that belongs to a shard, and the rows and columns of the shard that it
    fills.
    """

    weight: DequantizedOnDisk
    spans: Box  # the box in the weight, as stored
    matrix: int  # index of the shard's matrix that the box belongs to
    at: Box  # rows and columns of that matrix


class StoredLinear(nn.Linear):
    """Compute an ``nn.Linear`` whose ``weight`` is held in the checkpoint's own bytes, ``uint8 [data ranks, bytes]``.
    The bytes are decoded in each forward and backward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Project ``x [..., in]`` to ``[..., out]``."""
        x = autocasted(x)
        return frozen_linear(
            x,
            None if self.bias is None else self.bias.to(x.dtype),
            self._product,
            self._read,
            by_values=True,
        )

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, self._read(x.dtype), bias)

    def _read(self, dtype: torch.dtype) -> Tensor:
        return read_quantized(self, "weight", dtype)[0]


class StoredRow:
    """Read lazily the bytes that the rank at the coordinates ``ranks`` keeps of a quantized weight with two or three
    dims, as one row.
    """

    def __init__(
        self, planned: ParameterPlan, sources: Sequence[Source], ranks: Mapping[str, int]
    ) -> None:
        missing = 3 - len(planned.shape)
        matrices, rows, columns = shape = (*(1,) * missing, *planned.model_shape(dict(ranks)))
        cut = next(iter(planned.data_cuts), Cut("", 0, 1))
        dim = cut.dim + missing
        shards = []
        for rank in range(cut.size):
            spans = share_spans(planned.shape, planned.cuts, {**ranks, cut.axis: rank})
            blocks = _grouped(_pieces(sources, [*[[(0, 1)]] * missing, *spans]))
            shards.append((cut.spans(shape[dim], rank)[0], tuple(block for block, _ in blocks)))
            if rank == ranks.get(cut.axis, 0):
                self._own = blocks
        self.encoding = StoredEncoding(
            (matrices, rows, columns), sources[0][0].dtype, None, dim, tuple(shards)
        )
        self.shape = (1, self.encoding.row_shape[1])

    def __getitem__(self, index: Any) -> Tensor:
        row = torch.zeros(self.shape, dtype=torch.uint8)
        block_begin = 0
        for block, pieces in self._own:
            for kept, begin, size in block.places():
                for number, piece in enumerate(pieces):
                    part = piece.weight.parts[kept.name]
                    words = part.source.read(part.box(piece.spans)).contiguous()
                    start = block_begin + begin + number * size
                    row[0, start : start + size] = words.view(torch.uint8).flatten()
            block_begin += block.size
        return row[index]

    def hold(self, model: nn.Module, name: str) -> None:
        """Make the module of parameter ``name`` compute with these bytes. The parameter becomes a meta tensor with the
        shape of the bytes.
        """
        module, attribute = owner_of(model, name)
        if isinstance(module, nn.Linear):
            module.__class__ = StoredLinear
        register_quantized(module, attribute, self.encoding)


def _pieces(sources: Sequence[Source], spans: Sequence[Spans]) -> Iterator[_Piece]:
    """Yield, for each stored matrix in ``sources``, its box that belongs to a shard. ``spans`` lists the intervals of
    the parameter that the shard consists of, for each of three dims.
    """
    for weight, box in sources:
        edges = [(0, 1)] * (3 - len(box)) + list(box)
        hits = [overlaps([edge], within) for edge, within in zip(edges, spans, strict=True)]
        for (matrix, place, count), *inner in product(*hits):
            inside = [(start, start + length) for start, _, length in inner]
            at = tuple((start, start + length) for _, start, length in inner)
            if weight.transposed:
                inside.reverse()
            for number in range(count):
                lead = [(matrix + number, matrix + number + 1)] if len(weight.shape) > 2 else []
                yield _Piece(weight, (*lead, *inside), place + number, at)


def _grouped(pieces: Iterator[_Piece]) -> list[tuple[KeptBlock, list[_Piece]]]:
    """Group the boxes of consecutive matrices that fill the same rows and columns of a shard in the same way; return
    the description of each group with its boxes.
    """
    found = list[tuple[KeptBlock, list[_Piece]]]()
    for piece in sorted(pieces, key=lambda piece: (piece.at, piece.matrix)):
        alone = _block(piece)
        if found and found[-1][0] == alone and found[-1][1][-1].matrix + 1 == piece.matrix:
            found[-1][1].append(piece)
        else:
            found.append((alone, [piece]))
    return [
        (replace(block, at=((held[0].matrix, held[-1].matrix + 1), *block.at[1:])), held)
        for block, held in found
    ]


def _block(piece: _Piece) -> KeptBlock:
    """Describe one box of a stored matrix; boxes of other matrices that can be stored together with it have an equal
    description.
    """
    weight = piece.weight
    inside = piece.spans[-2:]
    alongs = {name: (part.rows, part.columns) for name, part in weight.parts.items()}
    units = [lcm(*(along.entries for along in each)) for each in zip(*alongs.values(), strict=True)]
    skipped = [start - start % unit for (start, _), unit in zip(inside, units, strict=True)]
    parts = []
    for name, part in weight.parts.items():
        box = part.box(piece.spans)[-2:]
        before = [
            skip // along.entries * along.words
            for skip, along in zip(skipped, alongs[name], strict=True)
        ]
        origin = tuple(start - left_out for (start, _), left_out in zip(box, before, strict=True))
        shape = tuple(stop - start for start, stop in box)
        parts.append(KeptPart(name, part.source.dtype, origin, shape, *alongs[name]))
    spans = tuple(
        (start - skip, stop - skip) for (start, stop), skip in zip(inside, skipped, strict=True)
    )
    return KeptBlock(
        tuple(parts), weight.arithmetic_now, weight.transposed, spans, ((0, 1), *piece.at)
    )
