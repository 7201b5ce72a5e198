"""Locate each rank's shard of a tensor of a training state in the full tensor: integers in, integers out.

Every rank writes its own shards of the weights and of the optimizer's state. Their place in the full tensor follows
from the plan's cuts of the weight::

    a moment of a weight [R, C]             cut as the weight
    several moments [2, R, C]               likewise, behind a dim of its own
    means of its rows [R]                   cut as dim R; ranks that differ along C hold the same means
    scales of blocks of 256 entries         the blocks of the shard (:mod:`.quantized`)
    anything else                           every rank's own, which means nothing in another layout
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
    """Describe one tensor of a training state."""

    shape: tuple[int, ...]  # the global shape; for a tensor that is each rank's own, the weight's
    cuts: tuple[
        Cut, ...
    ] = ()  # how it is cut between ranks; for scales of blocks, the weight's cuts
    home: int = 0  # the pipeline rank whose copy is written
    block: int = 0  # for scales of blocks, entries of the flattened weight per scale; else 0
    weight: tuple[int, ...] = ()  # for scales of blocks, the shape of the weight
    own: bool = False  # whether it is each rank's own

    def spans(self, ranks: dict[str, int]) -> list[Spans]:
        """Return, per dim of the full tensor, the spans that the rank at ``ranks`` holds; not for scales of blocks."""
        return share_spans(self.shape, self.cuts, ranks)

    def local_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Return the shape of the shard at ``ranks``."""
        if self.block:
            return (*self.shape[:-1], len(self.blocks(ranks)))
        return tuple(sum(stop - start for start, stop in dim) for dim in self.spans(ranks))

    def blocks(self, ranks: dict[str, int]) -> Tensor:
        """Return the indices of the full tensor's blocks in the weight's shard at ``ranks``, in the shard's order."""
        return flat_blocks(self.weight, share_spans(self.weight, self.cuts, ranks), self.block)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, without defaults."""
        told: dict[str, Any] = {"shape": list(self.shape)}
        if self.cuts:
            told["cuts"] = [
                [
                    c.axis,
                    c.dim,
                    c.size,
                    list(c.parts),
                    list(c.replicas),
                ]
                for c in self.cuts
            ]
        for name in ("home", "block", "own"):
            if value := getattr(self, name):
                told[name] = value
        return {**told, "weight": list(self.weight)} if self.weight else told

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> "StateTensor":
        """Rebuild a tensor from :meth:`to_dict`."""
        cuts = tuple(
            Cut(axis, dim, size, tuple(p), tuple(r))
            for axis, dim, size, p, r in told.get("cuts", ())
        )
        rest = {name: told[name] for name in ("home", "block", "own") if name in told}
        return cls(
            tuple(told["shape"]),
            cuts,
            weight=tuple(told.get("weight", ())),
            **rest,
        )


def like(planned: ParameterPlan, *lead: int) -> StateTensor:
    """Describe a tensor cut like the weight, with uncut dims ``lead`` in front."""
    return StateTensor(
        (*lead, *planned.shape),
        tuple(replace(c, dim=c.dim + len(lead)) for c in planned.cuts),
    )


def without_dim(planned: ParameterPlan, dim: int) -> StateTensor:
    """Describe a mean over a dim of the weight; ranks that are cut along that dim hold the same values."""
    dim %= len(planned.shape)
    cuts = (replace(c, dim=c.dim - (c.dim > dim)) for c in planned.cuts if c.dim != dim)
    return StateTensor(
        (*planned.shape[:dim], *planned.shape[dim + 1 :]),
        tuple(cuts),
    )


def scales(planned: ParameterPlan, block: int, *lead: int, whole: bool = False) -> StateTensor:
    """Describe scales of ``block`` entries of the flattened weight; ``whole`` if every rank has all of them."""
    count = -(-prod(planned.shape) // block)
    cuts = () if whole else planned.cuts
    return StateTensor(
        (*lead, count), cuts, block=block if cuts else 0, weight=planned.shape if cuts else ()
    )


def whole(*shape: int) -> StateTensor:
    """Describe a tensor that is the same on every rank."""
    return StateTensor(tuple(shape))


def own(planned: ParameterPlan) -> StateTensor:
    """Describe a tensor that each rank keeps for itself, about a weight; a full tensor if the weight is not cut."""
    return StateTensor(planned.shape, planned.cuts, own=True)


def flat_blocks(shape: Sequence[int], spans: Sequence[Spans], block: int) -> Tensor:
    """Return the indices of the flattened full tensor's blocks in the shard ``spans``; its runs are complete blocks."""
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
