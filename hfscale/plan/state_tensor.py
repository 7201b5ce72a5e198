"""Locate each rank's shard of a tensor of the training state in the full tensor: pure arithmetic.

Every rank writes its shards of the weights and of the optimizer's state. The place of a shard in the full tensor
follows from the planned cuts of the weight::

    moment of a weight [R, C]               sharded like the weight
    several moments [2, R, C]               sharded like the weight, after an unsharded first dim
    means of the weight's rows [R]          sharded like dim R; ranks with different shards of C hold the same means
    scales of blocks of 256 entries         the blocks of the shard (:mod:`.quantized`)
    any other tensor                        different on every rank; cannot be loaded in another layout
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
    """Describe one tensor of the training state: its global shape, and how it is sharded."""

    shape: tuple[int, ...]  # the global shape; if ``own``, the shape of the weight
    # the tensor's cuts; for scales of blocks, the weight's cuts
    cuts: tuple[Cut, ...] = ()
    home: int = 0  # the pipeline rank whose copy is written
    block: int = 0  # for scales of blocks, the entries of the flattened weight per scale; else 0
    weight: tuple[int, ...] = ()  # for scales of blocks, the shape of the weight
    # Whether the tensor is different on every rank, and not a shard of a full tensor
    own: bool = False

    def spans(self, ranks: dict[str, int]) -> list[Spans]:
        """Return, per dim of the full tensor, the spans that the rank at ``ranks`` holds. Do not call it for scales of
        blocks.
        """
        return share_spans(self.shape, self.cuts, ranks)

    def local_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Return the shape of the shard at ``ranks``."""
        if self.block:
            return (*self.shape[:-1], len(self.blocks(ranks)))
        return tuple(sum(stop - start for start, stop in dim) for dim in self.spans(ranks))

    def blocks(self, ranks: dict[str, int]) -> Tensor:
        """Return the indices of the full weight's blocks that are in the shard at ``ranks``, in the shard's order."""
        return flat_blocks(self.weight, share_spans(self.weight, self.cuts, ranks), self.block)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data; fields with default values are omitted."""
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
    """Describe a tensor that is sharded like the weight, with unsharded dims of sizes ``lead`` in front."""
    return StateTensor(
        (*lead, *planned.shape),
        tuple(replace(c, dim=c.dim + len(lead)) for c in planned.cuts),
    )


def without_dim(planned: ParameterPlan, dim: int) -> StateTensor:
    """Describe a mean over dim ``dim`` of the weight. Ranks with different shards along this dim hold the same
    values.
    """
    dim %= len(planned.shape)
    cuts = (replace(c, dim=c.dim - (c.dim > dim)) for c in planned.cuts if c.dim != dim)
    return StateTensor(
        (*planned.shape[:dim], *planned.shape[dim + 1 :]),
        tuple(cuts),
    )


def scales(planned: ParameterPlan, block: int, *lead: int, whole: bool = False) -> StateTensor:
    """Describe the scales of blocks of ``block`` entries of the flattened weight. ``whole``: every rank has all
    scales.
    """
    count = -(-prod(planned.shape) // block)
    cuts = () if whole else planned.cuts
    return StateTensor(
        (*lead, count), cuts, block=block if cuts else 0, weight=planned.shape if cuts else ()
    )


def whole(*shape: int) -> StateTensor:
    """Describe a tensor that is the same on every rank."""
    return StateTensor(tuple(shape))


def own(planned: ParameterPlan) -> StateTensor:
    """Describe a tensor that is different on every rank of a weight; a full tensor if the weight is not sharded."""
    return StateTensor(planned.shape, planned.cuts, own=True)


def flat_blocks(shape: Sequence[int], spans: Sequence[Spans], block: int) -> Tensor:
    """Return the indices of the flattened full tensor's blocks in the shard ``spans``, which must consist of whole
    blocks.
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
