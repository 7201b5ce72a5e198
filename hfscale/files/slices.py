"""Show a checkpoint through the plan: a tensor that, when read, reads only one rank's share."""

from collections.abc import Sequence
from copy import copy
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..plan import Cut, Plan
from ..plan.cut import Spans, share_spans
from .reader import NAMES, TensorOnDisk


def is_elsewhere(plan: Plan, rank: int, name: str) -> bool:
    """Whether a parameter, buffer or module is other stages' only: pipeline rank ``rank`` has a stand-in there."""
    return (
        plan.stages is not None and not plan.is_local(rank, name) and any(s.is_local(name) for s in plan.stages.stages)
    )


class PartOnDisk:
    """Of a stored tensor, per dim, the ``spans``, laid side by side."""

    def __init__(self, source: TensorOnDisk, spans: Sequence[Spans]) -> None:
        self.source, self.dtype, self.spans = source, source.dtype, spans
        self.shape = tuple(sum(stop - start for start, stop in dim) for dim in spans)

    def get_shape(self) -> list[int]:
        """Shape of the part."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Its type, as safetensors names it."""
        return NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        pieces = list(product(*self.spans))
        if len(pieces) == 1:
            part = _read(self.source, pieces[0])
        else:
            part = torch.empty(self.shape, dtype=self.dtype)
            places = [_places(dim) for dim in self.spans]
            for box, place in zip(pieces, product(*places), strict=True):
                part[tuple(slice(*span) for span in place)] = _read(self.source, box)
        return part if index is Ellipsis else part[index]


class ShareOnDisk(PartOnDisk):
    """The share of a stored tensor that the ``cuts`` leave to the rank at coordinates ``ranks``."""

    def __init__(self, source: TensorOnDisk, cuts: tuple[Cut, ...], ranks: dict[str, int]) -> None:
        super().__init__(source, [spans or [(0, 0)] for spans in share_spans(source.shape, cuts, ranks)])


def _read(source: TensorOnDisk, box: tuple[tuple[int, int], ...]) -> Tensor:
    """Read one box. Of matrices stacked in one tensor, rows of each are read, not each of them whole."""
    if len(box) < 3 or box[1] == (0, source.shape[1]):
        return source.read(box)
    rows = copy(source)  # the same bytes as one matrix, all below one another
    rows.shape = (source.shape[0] * source.shape[1], *source.shape[2:])
    (first, last), (start, stop), *rest = box
    part = torch.empty([high - low for low, high in box], dtype=source.dtype)
    for place, matrix in enumerate(range(first, last)):
        offset = matrix * source.shape[1]
        part[place] = rows.read(((offset + start, offset + stop), *rest))
    return part


def _places(spans: Spans) -> Spans:
    """Where each span lies once all are laid side by side."""
    result, offset = [], 0
    for start, stop in spans:
        result.append((offset, offset + stop - start))
        offset += stop - start
    return result
