"""Show a checkpoint through the plan: a tensor that, when read, reads only one rank's share."""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..plan import Cut, Plan
from .reader import NAMES, TensorOnDisk


def is_elsewhere(plan: Plan, rank: int, name: str) -> bool:
    """Whether a parameter, buffer or module is other stages' only: pipeline rank ``rank`` has a stand-in there."""
    return plan.stages is not None and not plan.holds(rank, name) and any(s.holds(name) for s in plan.stages.stages)


class ShareOnDisk:
    """The share of a stored tensor that the ``cuts`` leave to the rank at coordinates ``ranks``."""

    def __init__(self, source: TensorOnDisk, cuts: tuple[Cut, ...], ranks: dict[str, int]) -> None:
        self.source, self.dtype = source, source.dtype
        # Per dim: the spans of the stored tensor that make up the share, in order.
        self.spans: list[list[tuple[int, int]]] = [[(0, size)] for size in source.shape]
        for cut in cuts:
            self.spans[cut.dim] = _narrow(self.spans[cut.dim], cut, ranks.get(cut.axis, 0))
        self.shape = tuple(sum(stop - start for start, stop in dim) for dim in self.spans)

    def get_shape(self) -> list[int]:
        """Shape of the share."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Its type, as safetensors names it."""
        return NAMES[self.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        pieces = list(product(*self.spans))
        if len(pieces) == 1:
            share = self.source.read(pieces[0])
        else:
            share = torch.empty(self.shape, dtype=self.dtype)
            places = [_places(dim) for dim in self.spans]
            for box, place in zip(pieces, product(*places), strict=True):
                share[tuple(slice(*span) for span in place)] = self.source.read(box)
        return share if index is Ellipsis else share[index]


def _places(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where each span lies once all are laid side by side."""
    result, offset = [], 0
    for start, stop in spans:
        result.append((offset, offset + stop - start))
        offset += stop - start
    return result


def _narrow(spans: list[tuple[int, int]], cut: Cut, rank: int) -> list[tuple[int, int]]:
    """Apply one cut to a dim that is itself made of spans of the stored tensor."""
    length = sum(stop - start for start, stop in spans)
    result = []
    for wanted_start, wanted_stop in cut.spans(length, rank):
        offset = 0
        for start, stop in spans:
            low = max(wanted_start, offset)
            high = min(wanted_stop, offset + stop - start)
            if low < high:
                result.append((start + low - offset, start + high - offset))
            offset += stop - start
    return result or [(0, 0)]
