"""Lazy tensors of a checkpoint that, when indexed, read only this rank's shard."""

from collections.abc import Sequence
from itertools import product
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
