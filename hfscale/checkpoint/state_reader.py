"""Read any shard of a tensor of a saved state, whatever shards it was written in.

Only the needed bytes are read: the boxes in which the written shards overlap the wanted one. If a rank wants a shard
just as it was written, that is one read.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.files.reader import SafetensorsFile, TensorOnDisk
from ..errors import CheckpointError
from ..plan.cut import Spans, overlaps, share_spans
from ..plan.state_tensor import StateTensor
from .state_index import StateIndex, weights_name, writer_of, writers

_OPEN_FILES = 64


class StateReader:
    """A reader of one saved state's tensors, by their keys in its index."""

    def __init__(self, directory: Path, index: StateIndex) -> None:
        self.directory, self.index = directory, index
        self._file = lru_cache(_OPEN_FILES)(partial(_slices, directory))

    def read(self, key: str, wanted: StateTensor, ranks: dict[str, int]) -> Tensor:
        """Return a copy of the shard of a tensor at ``ranks``, on the CPU.

        Args:
            wanted: how the reading layout shards the tensor.

        Raises:
            CheckpointError: it has another shape, is usable only in the layout it was written in, or is incomplete.
        """
        self.check(key, wanted)
        written = self.index.tensors[key]
        if written.cuts == wanted.cuts and (written.own or written.block == wanted.block):
            if not written.own and 0 in wanted.local_shape(ranks):
                return self._empty(key, wanted.local_shape(ranks))
            return self._piece(key, written, writer_of(written, ranks))[...]
        if written.block or wanted.block:
            whole = self._whole(key, written)
            return whole[..., wanted.blocks(ranks)].contiguous() if wanted.block else whole
        return self._assembled(key, written, wanted.spans(ranks))

    def whole(self, key: str) -> Tensor:
        """Return the full tensor."""
        return self._whole(key, self.index.tensors[key])

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's dtype."""
        written = self.index.tensors[key]
        return self._piece(key, written, {}).dtype

    def check(self, key: str, wanted: StateTensor) -> None:
        """Raise the errors of :meth:`read`, without reading."""
        written = self.index.tensors.get(key)
        if written is None:
            raise CheckpointError(f"{self.directory} has no {key}: it is of another model or another optimizer")
        if written.own and written.cuts != wanted.cuts:
            raise CheckpointError(
                f"{self.directory} has {key} as each rank kept it, which means something in the layout "
                f"{self.index.sizes} only: resume in that one, or make the optimizer with hfscale.create_optimizer, "
                "whose states resume in every layout"
            )
        if not written.own and written.shape != wanted.shape:
            raise CheckpointError(
                f"{self.directory} has no {key} of shape {wanted.shape}, but one of {written.shape}: it is of another "
                "model"
            )

    def _piece(self, key: str, written: StateTensor, ranks: dict[str, int]) -> TensorOnDisk:
        rank = self.index.rank_of(written.cuts, {**ranks, "pp": written.home})
        found: TensorOnDisk | None = self._file(rank).get(key)
        if found is None:
            raise CheckpointError(
                f"{self.directory}/{weights_name(rank)} has no {key}, of which that rank held a share: it is damaged, "
                "use another state"
            )
        shape = found.shape if written.own else written.local_shape(dict.fromkeys(self.index.sizes, 0) | ranks)
        if found.shape != shape:
            raise CheckpointError(
                f"{self.directory}/{weights_name(rank)} has {key} of shape {found.shape}, not {shape}: the "
                "file is damaged, or another rank's; use another state"
            )
        return found

    def _pieces(self, written: StateTensor, wanted: list[Spans]) -> Iterator[dict[str, int]]:
        """Yield the coordinates of written shards that overlap the wanted one, found cut by cut to skip most early."""
        holders = list(writers(written))

        def below(done: int, ranks: dict[str, int]) -> Iterator[dict[str, int]]:
            spans = share_spans(written.weight or written.shape, written.cuts[:done], ranks)
            if wanted and not all(overlaps(want, held) for want, held in zip(wanted, spans, strict=True)):
                return
            if done == len(written.cuts):
                yield ranks
                return
            for rank in holders[done]:
                yield from below(done + 1, {**ranks, written.cuts[done].axis: rank})

        yield from below(0, {})

    def _assembled(self, key: str, written: StateTensor, wanted: list[Spans]) -> Tensor:
        shape = [sum(stop - start for start, stop in dim) for dim in wanted]
        found = self._empty(key, shape)
        if 0 in shape:
            return found
        covered = 0
        for ranks in self._pieces(written, wanted):
            piece = self._piece(key, written, ranks)
            meet = [overlaps(want, held) for want, held in zip(wanted, written.spans(ranks), strict=True)]
            for box in product(*meet):
                place = tuple(slice(into, into + length) for into, _, length in box)
                found[place] = piece.read(tuple((start, start + length) for _, start, length in box))
                covered += prod(length for *_, length in box)
        if covered < prod(shape):
            raise CheckpointError(f"{self.directory} has only a part of {key}: it is damaged, use another state")
        return found

    def _whole(self, key: str, written: StateTensor) -> Tensor:
        if not written.block:
            return self._assembled(key, written, [[(0, size)] for size in written.shape])
        found = self._empty(key, written.shape)
        for ranks in self._pieces(written, []):
            numbers = written.blocks(ranks)
            if len(numbers):
                found[..., numbers] = self._piece(key, written, ranks)[...]
        return found

    def _empty(self, key: str, shape: Any) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype(key))


def _slices(directory: Path, rank: int) -> dict[str, TensorOnDisk]:
    return SafetensorsFile(directory / weights_name(rank)).slices()
