"""Lazy tensors of a checkpoint that, when indexed, read only this rank's shard."""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...plan import Cut, Plan
from ...plan.cut import Spans, share_spans
from .reader import NAMES, TensorOnDisk


def is_elsewhere(plan: Plan, rank: int, name: str) -> bool:
    """Return whether a parameter, buffer or module is only on other stages than those of pipeline rank ``rank``."""
    return (
        plan.stages is not None and not plan.is_local(rank, name) and any(s.is_local(name) for s in plan.stages.stages)
    )


class PartOnDisk:
    """Select ``spans`` of each dim of a stored tensor, concatenated."""

    def __init__(self, source: TensorOnDisk, spans: Sequence[Spans]) -> None:
        self.source, self.dtype, self.spans = source, source.dtype, spans
        self.shape = tuple(sum(stop - start for start, stop in dim) for dim in spans)

    def get_shape(self) -> list[int]:
        """Return the shape of the selection."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        pieces = list(product(*self.spans))
        if len(pieces) == 1:
            part = self.source.read(pieces[0])
        else:
            part = torch.empty(self.shape, dtype=self.dtype)
            places = [_places(dim) for dim in self.spans]
            for box, place in zip(pieces, product(*places), strict=True):
                part[tuple(slice(*span) for span in place)] = self.source.read(box)
        return part if index is Ellipsis else part[index]


class ShareOnDisk(PartOnDisk):
    """Select the shard of a stored tensor that ``cuts`` give to the rank at coordinates ``ranks``."""

    def __init__(self, source: TensorOnDisk, cuts: tuple[Cut, ...], ranks: dict[str, int]) -> None:
        super().__init__(source, [spans or [(0, 0)] for spans in share_spans(source.shape, cuts, ranks)])


def _places(spans: Spans) -> Spans:
    """Return the position of each span once all are concatenated."""
    result, offset = [], 0
    for start, stop in spans:
        result.append((offset, offset + stop - start))
        offset += stop - start
    return result


_BLOCK_BYTES = 64 << 20


class ResizedOnDisk(TensorOnDisk):
    """The first ``rows`` of ``source``, or all followed by copies of the mean of its rows: a token that was never seen
    scores as the average of all (Hewitt, "Initializing new word embeddings for pretrained language models", 2021).
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
