"""Compute where in a full tensor of the training state the shard of each rank lies; only indices, no communication.

Every rank saves its shards of the weights and of the optimizer's state. How a tensor of the optimizer's state is
sharded follows from the sharding of its weight ``[R, C]``::

    momentum [R, C]                    sharded like the weight
    several momenta [2, R, C]          sharded like the weight, after an unsharded first dim
    means of the weight's rows [R]     sharded like dim R; ranks that hold different columns have the same means
    scales of blocks of 256 entries    those of the blocks in the rank's shard of the weight (:mod:`.quantized`)
    any other tensor                   different on every rank; cannot be loaded in another layout
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
    """Describe one tensor of the training state (a weight, or a tensor of the optimizer's state): its global shape, and
    how it is sharded.
    """

    shape: tuple[int, ...]  # the global shape; if ``own``, the shape of the weight
    # the tensor's cuts; for scales of blocks, the weight's cuts
    cuts: tuple[Cut, ...] = ()
    home: int = 0  # the pipeline rank whose copy is written
    block: int = 0  # for scales of blocks, the entries of the flattened weight per scale; else 0
    weight: tuple[int, ...] = ()  # for scales of blocks, the shape of the weight
    # Whether the tensor is different on every rank, and not a shard of a full tensor
    own: bool = False

    def spans(self, ranks: dict[str, int]) -> list[Spans]:
        """Return, for each dim of the full tensor, the intervals of indices that the rank at coordinates ``ranks``
        (axis -> rank) holds. Only for tensors other than scales of blocks.
        """
        return share_spans(self.shape, self.cuts, ranks)

    def local_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Return the shape of the shard on the rank at coordinates ``ranks`` (axis -> rank)."""
        if self.block:
            return (*self.shape[:-1], len(self.blocks(ranks)))
        return tuple(sum(stop - start for start, stop in dim) for dim in self.spans(ranks))

    def blocks(self, ranks: dict[str, int]) -> Tensor:
        """Return the indices, among all quantization blocks of the weight, of those blocks whose scales the rank at
        coordinates ``ranks`` (axis -> rank) holds, in the order in which it holds them.
        """
        return flat_blocks(self.weight, share_spans(self.weight, self.cuts, ranks), self.block)

    def to_dict(self) -> dict[str, Any]:
        """Return this description as a JSON-compatible dict without fields that have default values."""
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
        """Rebuild the description from the dict that :meth:`to_dict` returned."""
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
    """Describe a state tensor that is sharded like the weight ``planned``, with further unsharded dims of sizes
    ``lead`` in front.
    """
    return StateTensor(
        (*lead, *planned.shape),
        tuple(replace(c, dim=c.dim + len(lead)) for c in planned.cuts),
    )


def without_dim(planned: ParameterPlan, dim: int) -> StateTensor:
    """Describe a state tensor that holds means over dim ``dim`` of the weight ``planned``. Ranks that differ only in
    their shard of this dim hold the same means.
    """
    dim %= len(planned.shape)
    cuts = (replace(c, dim=c.dim - (c.dim > dim)) for c in planned.cuts if c.dim != dim)
    return StateTensor(
        (*planned.shape[:dim], *planned.shape[dim + 1 :]),
        tuple(cuts),
    )


def scales(planned: ParameterPlan, block: int, *lead: int, whole: bool = False) -> StateTensor:
    """Describe the scales of a quantized state tensor, with one scale per ``block`` entries of the flattened weight
    ``planned``, and unsharded dims of sizes ``lead`` in front. A rank has the scales of its shard; with ``whole``,
    every rank has all scales.
    """
    count = -(-planned.numel // block)
    cuts = () if whole else planned.cuts
    return StateTensor(
        (*lead, count), cuts, block=block if cuts else 0, weight=planned.shape if cuts else ()
    )


def whole(*shape: int) -> StateTensor:
    """Describe a state tensor of this shape that every rank holds in full."""
    return StateTensor(tuple(shape))


def own(planned: ParameterPlan) -> StateTensor:
    """Describe a state tensor of the sharded weight ``planned`` that every rank saves separately, because it is not a
    shard of a full tensor; if the weight is not sharded, it is a full tensor.
    """
    return StateTensor(planned.shape, planned.cuts, own=True)


def flat_blocks(shape: Sequence[int], spans: Sequence[Spans], block: int) -> Tensor:
    """Return the indices of the blocks of a full tensor that lie in one shard, where a block is ``block`` consecutive
    entries of the flattened full tensor. ``spans`` holds, for each dim, the intervals of the full tensor's indices in
    the shard, which must consist of whole blocks.
    """
    if not all(spans):
        return torch.empty(0, dtype=torch.long)
    cut = [dim for dim, size in enumerate(shape) if spans[dim] != [(0, size)]]
    if not cut:
        return torch.arange(-(-prod(shape) // block))
    # Runs of consecutive entries extend along the last sharded dim and all dims after it.
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
