"""How a tensor of a training state lies in the one that a single process would have: integers in, integers out.

Weights, and what optimizers keep of them, are written down by every rank as the share it holds. What a share is of the
whole is said by the plan's cuts, of the weight itself or of what is derived from it::

    a moment of a weight [R, C]             cut as the weight
    several moments [2, R, C]               likewise, behind a dim of its own
    means of its rows [R]                   cut as dim R; what is cut along C holds the same means on every rank
    scales of blocks of 256 entries         the blocks that the share is made of (:mod:`.flat_blocks`)
    what no rule is known of                every rank's own, which means nothing in another layout
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from .cut import Cut, Spans, share_spans
from .parameter import ParameterPlan


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a state.

    Attributes:
        shape: of the whole; of what is each rank's own, the weight's.
        cuts: how ranks share it; of scales of blocks, those of the weight.
        home: the pipeline rank whose copy is written.
        block: entries of the flattened weight with one scale; 0 for all other tensors.
        weight: the shape of the weight, of scales of blocks.
        own: whether it is each rank's own.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    home: int = 0
    block: int = 0
    weight: tuple[int, ...] = ()
    own: bool = False

    def spans(self, ranks: dict[str, int]) -> list[Spans]:
        """Per dim of the whole, what the rank at ``ranks`` has of it; not of scales of blocks."""
        return share_spans(self.shape, self.cuts, ranks)

    def local_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """The shape of that."""
        if self.block:
            return (*self.shape[:-1], len(self.blocks(ranks)))
        return tuple(sum(stop - start for start, stop in dim) for dim in self.spans(ranks))

    def blocks(self, ranks: dict[str, int]) -> Tensor:
        """The numbers of the whole's blocks in the share of the weight at ``ranks``, in its order."""
        return flat_blocks(self.weight, share_spans(self.weight, self.cuts, ranks), self.block)

    def told(self) -> dict[str, Any]:
        """As plain data, defaults left out."""
        told: dict[str, Any] = {"shape": list(self.shape)}
        if self.cuts:
            told["cuts"] = [[c.axis, c.dim, c.size, list(c.parts), list(c.replicas)] for c in self.cuts]
        for name in ("home", "block", "own"):
            if value := getattr(self, name):
                told[name] = value
        return {**told, "weight": list(self.weight)} if self.weight else told

    @classmethod
    def hear(cls, told: dict[str, Any]) -> "StateTensor":
        """The inverse of :meth:`told`."""
        cuts = tuple(Cut(axis, dim, size, tuple(p), tuple(r)) for axis, dim, size, p, r in told.get("cuts", ()))
        rest = {name: told[name] for name in ("home", "block", "own") if name in told}
        return cls(tuple(told["shape"]), cuts, weight=tuple(told.get("weight", ())), **rest)


def like(planned: ParameterPlan, *lead: int) -> StateTensor:
    """Cut as the weight, behind the dims ``lead``, which are whole."""
    return StateTensor((*lead, *planned.shape), tuple(replace(c, dim=c.dim + len(lead)) for c in planned.cuts))


def without_dim(planned: ParameterPlan, dim: int) -> StateTensor:
    """Means over a dim of the weight: those that are cut along it hold the same."""
    dim %= len(planned.shape)
    cuts = (replace(c, dim=c.dim - (c.dim > dim)) for c in planned.cuts if c.dim != dim)
    return StateTensor((*planned.shape[:dim], *planned.shape[dim + 1 :]), tuple(cuts))


def scales(planned: ParameterPlan, block: int, *lead: int, whole: bool = False) -> StateTensor:
    """One number for each ``block`` entries of the flattened weight; ``whole`` where every rank has all of them."""
    count = -(-prod(planned.shape) // block)
    cuts = () if whole else planned.cuts
    return StateTensor((*lead, count), cuts, block=block if cuts else 0, weight=planned.shape if cuts else ())


def whole(*shape: int) -> StateTensor:
    """The same on every rank."""
    return StateTensor(tuple(shape))


def own(planned: ParameterPlan) -> StateTensor:
    """Each rank's own, of a weight; of one that is not cut, it is the whole's."""
    return StateTensor(planned.shape, planned.cuts, own=True)


def flat_blocks(shape: Sequence[int], spans: Sequence[Spans], block: int) -> Tensor:
    """Numbers of the blocks of the flattened whole in the share ``spans``, whose runs are whole blocks."""
    if not all(spans):
        return torch.empty(0, dtype=torch.long)
    cut = [dim for dim, size in enumerate(shape) if spans[dim] != [(0, size)]]
    if not cut:
        return torch.arange(-(-prod(shape) // block))
    # Runs of consecutive entries lie along the last dim that is cut, over all that is behind it.
    last = cut[-1]
    offsets = torch.zeros(1, dtype=torch.long)
    for dim in range(last):
        places = torch.cat([torch.arange(start, stop) for start, stop in spans[dim]])
        offsets = (offsets[:, None] + places * prod(shape[dim + 1 :])).flatten()
    inner = prod(shape[last + 1 :])
    runs = [
        torch.div(offsets + low * inner, block, rounding_mode="floor")[:, None]
        + torch.arange(-(-((high - low) * inner) // block))
        for low, high in spans[last]
    ]
    return torch.cat(runs, 1).flatten()


def overlaps(wanted: Spans, held: Spans) -> list[tuple[int, int, int]]:
    """Where two shares of one dim meet: place in the wanted one, place in the one that is held, and how long."""
    found = []
    into = 0
    for first, last in wanted:
        place = 0
        for start, stop in held:
            low, high = max(first, start), min(last, stop)
            if low < high:
                found.append((into + low - first, place + low - start, high - low))
            place += stop - start
        into += last - first
    return found
