"""Read a weight that is stored quantized as a lazy tensor of dequantized values.

A quantized weight consists of several stored tensors: packed values, scales of blocks, zero points. Along each of the
last two dims, a fixed number of entries of the weight belongs to a fixed number of words of a stored tensor
(:class:`Along`). A box of the weight therefore corresponds to a box of each stored tensor, enlarged to whole blocks.
These boxes are read and dequantized a few rows at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .reader import Box, TensorOnDisk

Arithmetic = Callable[[Mapping[str, Tensor], torch.dtype], Tensor]
"""Computes a weight's values, in a given dtype, from its stored tensors by name, whose shapes broadcast."""
_ENTRIES = 1 << 19  # entries that are dequantized at a time
_MORE = 32  # factor of ``_ENTRIES`` on a GPU, where each step has the cost of a kernel launch


@dataclass(frozen=True)
class Along:
    """Describe how the words of a stored tensor correspond to the entries of the weight along one dim."""

    # number of the weight's entries that belong to ``words`` words of the stored tensor
    entries: int = 1
    words: int = 1  # number of words; 1 unless words are unpacked
    # unpacks ``[..., n x words]`` to ``[..., n x entries]``; ``None``: each word holds for all of its ``entries``
    unpack: Callable[[Tensor], Tensor] | None = None

    def words_of(
        self,
        span: tuple[int, int],
        length: int,
    ) -> tuple[int, int]:
        """Return the span of words that holds a ``span`` of the weight; the stored tensor has ``length`` words here."""
        start, stop = span
        return start // self.entries * self.words, min(
            -(-stop // self.entries) * self.words, length
        )

    def spread(self, words: Tensor, span: tuple[int, int], dim: int) -> Tensor:
        """Expand ``words``, read for ``span``, to one value per entry of ``span``, or to one value for all entries."""
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
    """Describe one stored tensor of a weight, with as many dims as the weight."""

    source: TensorOnDisk  # the tensor
    # how words correspond to entries along the weight's second to last dim, as stored
    rows: Along = Along()
    # how words correspond to entries along the weight's last dim, as stored
    columns: Along = Along()

    def box(self, spans: Box) -> Box:
        """Return the box of words in the stored tensor for the box ``spans`` of the weight, as stored."""
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
        """Return this tensor's values for the box ``spans`` of the weight, as stored; they broadcast to the box."""
        words = self.source.read(self.box(spans))
        return self.columns.spread(
            self.rows.spread(words, spans[-2], -2),
            spans[-1],
            -1,
        )


class WordsInMemory(TensorOnDisk):
    """Hold a box of a stored tensor in memory; the box begins at index ``origin`` along the last dims."""

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
    """Read a quantized weight as plain values, which ``arithmetic`` computes from the stored ``parts``.

    ``transposed`` weights are stored as the transpose of the model's matrices. ``if_merged`` replaces ``arithmetic``
    for a weight that transformers merges with other weights into one parameter.
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
        self.arithmetic_now = arithmetic  # the function in use, chosen by :meth:`load_as`
        # stored tensors by name, each with its name in ``parts`` (``None`` if it is not in ``parts``)
        self.stored_as: dict[str, tuple[str | None, TensorOnDisk]] = {}

    def load_as(self, dtype: torch.dtype, merged: bool) -> None:
        """Set the dtype of the values, and whether transformers merges the weight with others into one parameter."""
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
        """Write the box ``spans`` of the weight, as stored, into ``out`` (of any dtype), a few entries at a time."""
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
    """Divide ``spans`` into boxes of whole matrices or whole rows with at most ``most`` entries, or of one row."""
    (start, stop), *inner = spans
    size = prod(high - low for low, high in inner)
    if len(inner) > 1 and size > most:
        for index in range(start, stop):
            yield from (((index, index + 1), *box) for box in _steps(tuple(inner), most))
        return
    step = max(1, most // size)
    for first in range(start, stop, step):
        yield ((first, min(first + step, stop)), *inner)
