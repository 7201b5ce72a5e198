"""Read tensors that several files hold in pieces, each a box of the full tensor, as trainers that shard write them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError
from .reader import Box, TensorOnDisk


class Readable(Protocol):
    """Read boxes of a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""
        ...

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``, a ``(start, stop)`` per dim."""
        ...


@dataclass(frozen=True)
class Piece:
    """Hold one box of a tensor."""

    offsets: tuple[int, ...]  # where it begins in the full tensor
    tensor: Readable

    def overlap(self, spans: Box) -> Box | None:
        """Return the part of ``spans`` that lies in this piece, in the full tensor's indices; ``None`` if none does."""
        box = tuple(
            (max(start, offset), min(stop, offset + size))
            for (start, stop), offset, size in zip(
                spans, self.offsets, self.tensor.shape, strict=True
            )
        )
        return box if all(start < stop for start, stop in box) else None


class TensorInPieces(TensorOnDisk):
    """Read one tensor of which files hold pieces; raise :class:`CheckpointError` if these do not make all of it."""

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Iterable[Piece]
    ) -> None:
        self.name = name
        self.shape = self._stored = tuple(shape)
        self.dtype = dtype
        # Replicas may each have written the same piece.
        self._pieces = list({piece.offsets: piece for piece in pieces}.values())
        sizes = [prod(piece.tensor.shape) for piece in self._pieces]
        if sum(sizes) != prod(self.shape):
            raise CheckpointError(
                f"{name} of shape {list(self.shape)} must be in pieces of {prod(self.shape):,} values together, got "
                f"{sum(sizes):,} in {len(sizes)} pieces: copy the files of all ranks that wrote the checkpoint"
            )

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``; of each piece, only what lies in the box is read."""
        if self.shape != self._stored:  # seen as a tensor of another shape
            whole = self._assembled(tuple((0, size) for size in self._stored))
            box = tuple(slice(start, stop) for start, stop in spans)
            return whole.view(self.shape)[box].clone()
        return self._assembled(spans)

    def _assembled(self, spans: Box) -> Tensor:
        out = torch.empty([stop - start for start, stop in spans], dtype=self.dtype)
        filled = 0
        for piece in self._pieces:
            box = piece.overlap(spans)
            if box is None:
                continue
            inside = tuple(
                (start - offset, stop - offset)
                for (start, stop), offset in zip(box, piece.offsets, strict=True)
            )
            place = tuple(
                slice(start - first, stop - first)
                for (start, stop), (first, _) in zip(box, spans, strict=True)
            )
            out[place] = piece.tensor.read(inside)
            filled += prod(stop - start for start, stop in box)
        if filled != out.numel():
            raise CheckpointError(
                f"{self.name} must be in pieces side by side, and {out.numel() - filled:,} values of it are in none, "
                "or in several: save the checkpoint again"
            )
        return out
