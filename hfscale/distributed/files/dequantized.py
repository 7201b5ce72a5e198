"""Read a weight that is stored quantized as a lazy tensor of dequantized values.

A quantized weight consists of several stored tensors: packed values, scales of blocks, zero points. The elements of
these tensors are called words: a word may pack several values, and a scale is for many values. Along each of the last
two dims, a fixed number of entries of the weight belongs to a fixed number of words (:class:`Along`). To read a slice
of the weight (a box: one ``(start, stop)`` per dim), the corresponding box of each stored tensor, enlarged to whole
quantization blocks, is read and dequantized, a few rows at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .reader import Box, TensorOnDisk, box_slices

Arithmetic = Callable[[Mapping[str, Tensor], torch.dtype], Tensor]
"""Function that computes a weight's values in a given dtype, from its stored tensors (values, scales ...) by name;
their shapes must broadcast.
"""
_ENTRIES = 1 << 19  # entries that are dequantized at a time
_MORE = 32  # factor of ``_ENTRIES`` on a GPU, where each step has the cost of a kernel launch


@dataclass(frozen=True)
class Along:
    """Describe how many entries of a weight, along one dim, belong to how many elements (words) of a stored tensor: a
    packed integer holds several entries, and a scale is for all entries of its block.
    """

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
        """Return the interval of words of the stored tensor that holds the interval ``span`` of the weight's entries,
        along a dim in which the stored tensor has ``length`` words.
        """
        start, stop = span
        return start // self.entries * self.words, min(
            -(-stop // self.entries) * self.words, length
        )

    def spread(self, words: Tensor, span: tuple[int, int], dim: int) -> Tensor:
        """Expand the stored ``words`` that were read for the interval ``span`` of the weight, along ``dim``, to one
        value per entry, or to one value that broadcasts.
        """
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
    """Describe one of the stored tensors that make up a quantized weight, such as its scales; it has as many dims as
    the weight.
    """

    source: TensorOnDisk  # the tensor
    # how words correspond to entries along the weight's second to last dim, as stored
    rows: Along = Along()
    # how words correspond to entries along the weight's last dim, as stored
    columns: Along = Along()

    def box(self, spans: Box) -> Box:
        """Return the box of this stored tensor that holds the box ``spans`` of the weight. Both are given as the
        checkpoint stores the weight, which may be transposed.
        """
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
        """Read this stored tensor's values for the box ``spans`` of the weight as the checkpoint stores it, which may
        be transposed. The values broadcast to the shape of the box.
        """
        words = self.source.read(self.box(spans))
        return self.columns.spread(
            self.rows.spread(words, spans[-2], -2),
            spans[-1],
            -1,
        )


class WordsInMemory(TensorOnDisk):
    """Hold in memory one box of a stored tensor, with the interface of a tensor on disk. ``origin`` is the index of the
    box's first element, along the last dims.
    """

    def __init__(self, words: Tensor, origin: Sequence[int]) -> None:
        lead = len(words.shape) - len(origin)
        self._words = words
        self._origin = (*(0,) * lead, *origin)
        self.shape = tuple(
            size + first for size, first in zip(words.shape, self._origin, strict=True)
        )
        self.dtype = words.dtype

    def read(self, spans: Box) -> Tensor:
        """Return the box ``spans``, one ``(start, stop)`` per dim, in indices of the full stored tensor."""
        return self._words[box_slices(spans, self._origin)]


class DequantizedOnDisk(TensorOnDisk):
    """Read a quantized weight lazily as dequantized values: ``arithmetic`` computes them from the stored tensors
    ``parts``.

    If ``transposed``, the stored matrices are the transposes of the model's. ``if_merged`` replaces ``arithmetic`` for
    a weight that transformers merges with other weights into one parameter.
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
        """Set the dtype of the dequantized values, and whether transformers merges this weight with other weights into
        one parameter, for which it may dequantize differently.
        """
        self.dtype = dtype
        self.arithmetic_now = (
            self.if_merged if merged and self.if_merged is not None else self.arithmetic
        )

    def read(self, spans: Box) -> Tensor:
        """Return the dequantized values of the box ``spans``, one ``(start, stop)`` per dim; of the stored tensors,
        whole quantization blocks are read.
        """
        out = self.empty(spans)
        if self.transposed:
            self.read_stored(
                (*spans[:-2], spans[-1], spans[-2]),
                out.transpose(-1, -2),
            )
        else:
            self.read_stored(spans, out)
        return out

    def read_stored(self, spans: Box, out: Tensor) -> None:
        """Write the dequantized values of the box ``spans`` into ``out``, which may have any dtype, a few rows at a
        time. ``spans`` are indices of the weight as the checkpoint stores it, which may be transposed.
        """
        most = _ENTRIES * (1 if out.device.type == "cpu" else _MORE)
        for box in _steps(spans, most) if out.numel() else ():
            found = {name: part.read(box) for name, part in self.parts.items()}
            out[box_slices(box, [start for start, _ in spans])] = self.arithmetic_now(
                found, self.dtype
            )


def _steps(spans: Box, most: int) -> Iterator[Box]:
    """Divide the box ``spans``, one ``(start, stop)`` per dim, into boxes with at most ``most`` entries that consist of
    whole matrices or whole rows; a single row may have more entries.
    """
    (start, stop), *inner = spans
    size = prod(high - low for low, high in inner)
    if len(inner) > 1 and size > most:
        for index in range(start, stop):
            yield from (((index, index + 1), *box) for box in _steps(tuple(inner), most))
        return
    step = max(1, most // size)
    for first in range(start, stop, step):
        yield ((first, min(first + step, stop)), *inner)
