"""A weight that is stored quantized, as a lazy tensor of plain values.

Its bytes are spread over several stored tensors: values in words, scales of blocks, zero points. Along each of the last
two dims, so many entries of the weight belong to so many of such a tensor (:class:`Along`), so a box of the weight
names a box of each of them, grown to whole blocks. These are read, a few rows at a time, and multiplied out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .reader import Box, TensorOnDisk

Arithmetic = Callable[[Mapping[str, Tensor], torch.dtype], Tensor]
"""Values of a dtype, from the tensors that make up a weight, by their part in it; their shapes broadcast."""
_ENTRIES = 1 << 19  # multiplied out at a time
_MORE = 32  # times as many on a device, where every step waits for its launch


@dataclass(frozen=True)
class Along:
    """How a stored tensor runs along one dim of the weight."""

    entries: int = 1  # how many entries of the weight belong to ``words`` of the stored tensor
    words: int = 1  # how many of its own; 1 unless they are unpacked
    # turns ``[..., n x words]`` into ``[..., n x entries]``; ``None``: each word counts for all ``entries``
    unpack: Callable[[Tensor], Tensor] | None = None

    def words_of(
        self,
        span: tuple[int, int],
        length: int,
    ) -> tuple[int, int]:
        """Return the span of the stored tensor, of ``length`` along this dim, that holds a ``span`` of the weight."""
        start, stop = span
        return start // self.entries * self.words, min(
            -(-stop // self.entries) * self.words, length
        )

    def spread(self, words: Tensor, span: tuple[int, int], dim: int) -> Tensor:
        """Return ``words``, read for ``span``, as one entry for each of ``span``, or one that stands for all."""
        start, stop = span
        offset = start % self.entries
        if self.unpack is not None:
            return (
                self.unpack(words.transpose(dim, -1))
                .narrow(-1, offset, stop - start)
                .transpose(dim, -1)
            )
        if self.entries == 1 or words.shape[dim] == 1:
            return words
        return words.index_select(
            dim, torch.arange(offset, offset + stop - start, device=words.device) // self.entries
        )


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor of a weight, with as many dims as the weight."""

    source: TensorOnDisk  # the tensor
    rows: Along = Along()  # how it runs along the weight's second to last dim, as stored
    columns: Along = Along()  # and along its last dim

    def box(self, spans: Box) -> Box:
        """Return the box of the stored tensor that holds a box of the weight, as stored."""
        shape = self.source.shape
        lead = [
            span if size > 1 else (0, 1) for span, size in zip(spans[:-2], shape[:-2], strict=True)
        ]
        return (
            *lead,
            self.rows.words_of(spans[-2], shape[-2]),
            self.columns.words_of(spans[-1], shape[-1]),
        )

    def read(self, spans: Box) -> Tensor:
        """Return the entries for a box of the weight, as stored; size 1 along a dim stands for all of it."""
        words = self.source.read(self.box(spans))
        return self.columns.spread(
            self.rows.spread(words, spans[-2], -2),
            spans[-1],
            -1,
        )


class WordsInMemory(TensorOnDisk):
    """A box of a stored tensor that has been read; ``origin`` is where it begins along the last dims."""

    def __init__(self, words: Tensor, origin: Sequence[int]) -> None:
        lead = len(words.shape) - len(origin)
        self._words = words
        self._origin = (*(0,) * lead, *origin)
        self.shape = tuple(
            size + first for size, first in zip(words.shape, self._origin, strict=True)
        )
        self.dtype = words.dtype

    def read(self, spans: Box) -> Tensor:
        """Return the box ``spans`` of the stored tensor."""
        return self._words[_slices(spans, self._origin)]


class DequantizedOnDisk(TensorOnDisk):
    """A weight as its plain values, which ``arithmetic`` makes of the stored ``parts`` when they are read: the weight's
    matrices, or ``transposed``. For a weight that the host merges with others into one parameter it is ``if_merged``.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        parts: Mapping[str, StoredPart],
        arithmetic: Arithmetic,
        transposed: bool = False,
        if_merged: Arithmetic | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = torch.bfloat16
        self.parts = parts
        self.arithmetic = arithmetic
        self.transposed = transposed
        self.if_merged = if_merged
        self.arithmetic_now = arithmetic  # of the values that the host loads
        # the stored tensors by name, each with its part in the weight, if it has one
        self.stored_as: dict[str, tuple[str | None, TensorOnDisk]] = {}

    def load_as(self, dtype: torch.dtype, merged: bool) -> None:
        """Set the dtype of the values, and whether the host merges the weight with others."""
        self.dtype = dtype
        self.arithmetic_now = (
            self.if_merged if merged and self.if_merged is not None else self.arithmetic
        )

    def read(self, spans: Box) -> Tensor:
        """Return the box ``spans``, one ``(start, stop)`` per dim; whole blocks of the stored tensors are read."""
        out = torch.empty([stop - start for start, stop in spans], dtype=self.dtype)
        if self.transposed:
            self.read_stored(
                (*spans[:-2], spans[-1], spans[-2]),
                out.transpose(-1, -2),
            )
        else:
            self.read_stored(spans, out)
        return out

    def read_stored(self, spans: Box, out: Tensor) -> None:
        """Write a box of the weight, as stored, into ``out``, of any dtype, a few entries at a time."""
        most = _ENTRIES * (1 if out.device.type == "cpu" else _MORE)
        for box in _steps(spans, most) if out.numel() else ():
            found = {name: part.read(box) for name, part in self.parts.items()}
            out[_slices(box, [start for start, _ in spans])] = self.arithmetic_now(
                found, self.dtype
            )


def _slices(spans: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), first in zip(spans, origin, strict=True)
    )


def _steps(spans: Box, most: int) -> Iterator[Box]:
    """Yield boxes of at most ``most`` entries, or of one row, that make up ``spans``: rows, or whole matrices."""
    (start, stop), *inner = spans
    size = prod(high - low for low, high in inner)
    if len(inner) > 1 and size > most:
        for index in range(start, stop):
            yield from (((index, index + 1), *box) for box in _steps(tuple(inner), most))
        return
    step = max(1, most // size)
    for first in range(start, stop, step):
        yield ((first, min(first + step, stop)), *inner)
