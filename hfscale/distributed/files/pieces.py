"""Read tensors that a sharded trainer has written in several files: each file holds a box of the tensor, an interval of
indices per dim.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...errors import CheckpointError
from .reader import Box, TensorOnDisk, box_slices


@dataclass(frozen=True)
class Piece:
    """Hold one stored box of a tensor: the indices at which it begins in the full tensor, and its values on disk."""

    offsets: tuple[int, ...]  # the first index of the box in the full tensor, per dim
    tensor: TensorOnDisk  # the box's values

    def overlap(self, spans: Box) -> Box | None:
        """Return the intersection of this stored box and the box ``spans``, as ``(start, stop)`` per dim of the full
        tensor; ``None`` if it is empty.
        """
        box = tuple(
            (max(start, offset), min(stop, offset + size))
            for (start, stop), offset, size in zip(
                spans, self.offsets, self.tensor.shape, strict=True
            )
        )
        return box if all(start < stop for start, stop in box) else None


class TensorInPieces(TensorOnDisk):
    """Read one tensor lazily that is stored as several boxes in several files.

    Raises:
        CheckpointError: the boxes do not make up the full tensor.
    """

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Iterable[Piece]
    ) -> None:
        self.name = name
        self.shape = self._stored = tuple(shape)
        self.dtype = dtype
        # Several replicas may have written the same piece.
        self._pieces = list({piece.offsets: piece for piece in pieces}.values())
        sizes = [prod(piece.tensor.shape) for piece in self._pieces]
        if sum(sizes) != prod(self.shape):
            raise CheckpointError(
                f"the shards of {name}, of shape {list(self.shape)}, must have {prod(self.shape):,} entries together, "
                f"got {sum(sizes):,} in {len(sizes)} shards: copy the files of all ranks that wrote the checkpoint"
            )

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``, ``(start, stop)`` per dim; of each file, only the intersection with this
        box is read.
        """
        if self.shape != self._stored:  # a view with another shape
            whole = self._assembled(tuple((0, size) for size in self._stored))
            return whole.view(self.shape)[box_slices(spans)].clone()
        return self._assembled(spans)

    def _assembled(self, spans: Box) -> Tensor:
        out = self.empty(spans)
        origin = [start for start, _ in spans]
        filled = 0
        for piece in self._pieces:
            box = piece.overlap(spans)
            if box is None:
                continue
            inside = tuple(
                (start - offset, stop - offset)
                for (start, stop), offset in zip(box, piece.offsets, strict=True)
            )
            out[box_slices(box, origin)] = piece.tensor.read(inside)
            filled += prod(stop - start for start, stop in box)
        if filled != out.numel():
            raise CheckpointError(
                f"the shards of {self.name} must cover the tensor exactly once, but {abs(out.numel() - filled):,} of "
                "its entries are missing or covered twice: save the checkpoint again"
            )
        return out
