"""A stored embedding matrix or bias, read with another number of rows than it was stored with."""

from math import prod

import torch
from torch import Tensor

from .reader import TensorOnDisk

_BLOCK_BYTES = 64 << 20


class ResizedOnDisk(TensorOnDisk):
    """The first ``rows`` of ``source``, or all of it followed by copies of the mean of its rows.

    A token that was never seen then scores as the average of all (Hewitt, "Initializing new word embeddings for
    pretrained language models", 2021).
    """

    def __init__(self, source: TensorOnDisk, rows: int) -> None:
        self._source, self.dtype = source, source.dtype
        self.shape = (rows, *source.shape[1:])

    def read(self, spans: tuple[tuple[int, int], ...]) -> Tensor:
        """Return a copy of the box ``spans``, one ``(start, stop)`` per dim."""
        (start, stop), *rest = spans
        stored = self._source.shape[0]
        out = torch.empty([stop - start, *(high - low for low, high in rest)], dtype=self.dtype)
        known = max(min(stop, stored) - start, 0)
        if known:
            out[:known] = self._source.read(((start, start + known), *rest))
        if known < stop - start:
            out[known:] = self._mean(rest).to(self.dtype)
        return out

    def _mean(self, rest: list[tuple[int, int]]) -> Tensor:
        sizes = [high - low for low, high in rest]
        total, stored = torch.zeros(sizes, dtype=torch.float64), self._source.shape[0]
        block = max(_BLOCK_BYTES // max(prod(sizes) * total.itemsize, 1), 1)
        for start in range(0, stored, block):
            total += self._source.read(((start, min(start + block, stored)), *rest)).sum(0, dtype=torch.float64)
        return total / stored
