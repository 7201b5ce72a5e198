"""A weight that is stored quantized, as a lazy tensor of plain values.

Its bytes are spread over several stored tensors: packed values, scales of blocks, zero points. Along each of the last
two dims, so many entries of the weight belong to so many of such a tensor (:class:`Along`), so a box of the weight
names a box of each of them, grown to whole blocks. These are read, a few rows at a time, and multiplied out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from .reader import NAMES, TensorOnDisk

Arithmetic = Callable[[Mapping[str, Tensor], torch.dtype], Tensor]
"""Values of a dtype, from the tensors that make up a weight, by their part in it; their shapes broadcast."""
Box = tuple[tuple[int, int], ...]
"""``(start, stop)`` per dim."""
_ENTRIES = 1 << 19  # multiplied out at a time


@dataclass(frozen=True)
class Along:
    """How a stored tensor runs along one dim of the weight.

    Attributes:
        entries: how many entries of the weight belong to ``words`` of the stored tensor.
        words: how many of its own; 1 unless they are unpacked.
        unpack: turns ``[..., n x words]`` into ``[..., n x entries]``; ``None``: each word counts for all ``entries``.
    """

    entries: int = 1
    words: int = 1
    unpack: Callable[[Tensor], Tensor] | None = None

    def words_of(self, span: tuple[int, int], length: int) -> tuple[int, int]:
        """Return the span of the stored tensor, of ``length`` along this dim, that holds a ``span`` of the weight."""
        start, stop = span
        return start // self.entries * self.words, min(-(-stop // self.entries) * self.words, length)

    def spread(self, words: Tensor, span: tuple[int, int], dim: int) -> Tensor:
        """Return ``words``, read for ``span``, as one entry for each of ``span``, or one that stands for all."""
        start, stop = span
        offset = start % self.entries
        if self.unpack is not None:
            return self.unpack(words.transpose(dim, -1)).narrow(-1, offset, stop - start).transpose(dim, -1)
        if self.entries == 1 or words.shape[dim] == 1:
            return words
        return words.index_select(dim, torch.arange(offset, offset + stop - start) // self.entries)


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor of a weight, with as many dims as the weight.

    Attributes:
        source: the tensor.
        rows: how it runs along the weight's second to last dim, as stored.
        columns: and along its last dim.
    """

    source: TensorOnDisk
    rows: Along = Along()
    columns: Along = Along()

    def box(self, index: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int]) -> Box:
        """Return the box of the stored tensor that holds a box of matrix ``index`` of the weight."""
        shape = self.source.shape
        lead = [(place, place + 1) if size > 1 else (0, 1) for place, size in zip(index, shape[:-2], strict=True)]
        return (*lead, self.rows.words_of(rows, shape[-2]), self.columns.words_of(columns, shape[-1]))

    def read(self, index: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Return the entries for a box of matrix ``index`` of the weight; size 1 along a dim stands for all of it."""
        words = self.source.read(self.box(index, rows, columns))
        return self.columns.spread(self.rows.spread(words.view(words.shape[-2:]), rows, -2), columns, -1)


class DequantizedOnDisk(TensorOnDisk):
    """A weight as its plain values, which are computed when they are read.

    Args:
        shape: of the weight.
        parts: the stored tensors by their part in ``arithmetic``.
        arithmetic: makes values of them.
        transposed: whether the stored matrices are the weight's transposed.
        if_merged: another arithmetic, for a weight that the host merges with others into one parameter.

    Attributes:
        dtype: of the values; bfloat16 until :meth:`load_as`.
        stored_as: the stored tensors by name, each with its part in the weight, if it has one.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        parts: Mapping[str, StoredPart],
        arithmetic: Arithmetic,
        transposed: bool = False,
        if_merged: Arithmetic | None = None,
    ) -> None:
        self.shape, self.dtype = shape, torch.bfloat16
        self.parts, self.arithmetic, self.transposed, self.if_merged = parts, arithmetic, transposed, if_merged
        self._merged = False
        self.stored_as: dict[str, tuple[str | None, TensorOnDisk]] = {}

    def load_as(self, dtype: torch.dtype, merged: bool) -> None:
        """Set the dtype of the values, and whether the host merges the weight with others."""
        self.dtype, self._merged = dtype, merged

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return NAMES[self.dtype]

    def read(self, spans: Box) -> Tensor:
        """Return the box ``spans``, one ``(start, stop)`` per dim; whole blocks of the stored tensors are read."""
        out = torch.empty([stop - start for start, stop in spans], dtype=self.dtype)
        if out.numel() == 0:
            return out
        *lead, rows, columns = spans
        matrices = out.view(-1, *out.shape[-2:])
        if self.transposed:
            rows, columns, matrices = columns, rows, matrices.transpose(-1, -2)
        step = max(1, _ENTRIES // (columns[1] - columns[0]))
        for index, matrix in zip(product(*(range(*span) for span in lead)), matrices, strict=True):
            for first in range(*rows, step):
                last = min(first + step, rows[1])
                found = {name: part.read(index, (first, last), columns) for name, part in self.parts.items()}
                matrix[first - rows[0] : last - rows[0]] = self.values_of(found, self.dtype, self._merged)
        return out

    def values_of(self, found: Mapping[str, Tensor], dtype: torch.dtype, merged: bool) -> Tensor:
        """Return the values that boxes of the parts stand for, of a weight that is ``merged`` with others, or not."""
        arithmetic = self.if_merged if merged and self.if_merged is not None else self.arithmetic
        return arithmetic(found, dtype)
