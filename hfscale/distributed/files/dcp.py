"""Read torch's distributed checkpoints (DCP), as FSDP2 in plain loops, Accelerate and Trainer write them.

``.metadata`` lists the pieces of every tensor; each lies in a file of the rank that wrote it, as ``torch.save`` would
write it to a file of its own, and is found there without reading it::

    .metadata            model.lm_head.weight: rows 0-15 in __0_0.distcp, bytes 5929-9554; rows 16-31 in __1_0.distcp
    __RANK_N.distcp      one archive of torch.save after the other
"""

import io
import os
import pickle
from contextlib import suppress
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._compat.dcp_metadata import Chunk, Keys, Place, contents_of
from ..._compat.torch_files import place_of_tensor
from ...errors import CheckpointError, first_line
from .directories import check_inside
from .pieces import Piece, TensorInPieces
from .reader import NAMES, Box, RawFile, TensorOnDisk
from .torch_file import TensorInTorchFile
from .weight_files import METADATA

_OF_OPTIMIZERS = "optim"
# Wrappers that put themselves into the names of parameters.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ADAPTERS = ".base_layer."


class _File(RawFile):
    """Read a file of several archives."""

    def archive(self, place: Place) -> "_Window":
        """Return the bytes of one archive as a file."""
        return _Window(self._file.fileno(), place)


class _Window(io.RawIOBase):
    """Read a part of an open file as if it were all of it."""

    def __init__(self, descriptor: int, place: Place) -> None:
        self._descriptor = descriptor
        self._begin = place.begin
        self._length = place.length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._at)]
        read = os.preadv(self._descriptor, [view], self._begin + self._at)
        self._at += read
        return read


class _ChunkOnDisk:
    """Read one piece of a tensor, whose place is looked up when it is first read."""

    def __init__(self, file: _File, name: str, chunk: Chunk, dtype: torch.dtype) -> None:
        self.shape = chunk.sizes
        self._file = file
        self._name = name
        self._place = chunk.place
        self._dtype = dtype

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``, one ``(start, stop)`` per dim."""
        return self._tensor.read(spans)

    @cached_property
    def _tensor(self) -> TensorOnDisk:
        archive = self._file.archive(self._place)
        try:
            place = place_of_tensor(archive, self._place.begin)
            if (place.dtype, place.shape) != (self._dtype, self.shape):
                raise ValueError(f"{place.dtype} {list(place.shape)} is stored")
        except Exception as error:  # whatever torch says of a damaged archive
            raise CheckpointError(
                f"{self._file.path} must hold {self._name} of type {self._dtype} and shape {list(self.shape)} at byte "
                f"{self._place.begin}, and does not ({first_line(error)}): copy the checkpoint again"
            ) from error
        return TensorInTorchFile(self._file, self._name, place)


class DistributedCheckpoint:
    """Hold what torch's distributed checkpoint lists; raise :class:`CheckpointError` if it cannot be read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, _File] = {}
        metadata = directory / METADATA
        try:
            self._contents = contents_of(metadata)
            unknown = {each.dtype for each in self._contents.tensors.values()} - NAMES.keys()
            if unknown:
                raise ValueError(f"it holds tensors of the type {unknown.pop()}")
        except Exception as error:  # of a damaged pickle, or another kind of file
            raise CheckpointError(
                f"{metadata} must be the metadata of a distributed checkpoint of torch's, and cannot be read "
                f"({first_line(error)}): copy it again, or merge it once where it was written (python -m "
                f"torch.distributed.checkpoint.format_utils dcp_to_torch {directory} OUT.pt)"
            ) from error

    @property
    def paths(self) -> list[Keys]:
        """Return where each tensor was in the dictionaries that were saved."""
        return list(self._contents.tensors)

    def size(self, path: Keys) -> int:
        """Return the number of values of a tensor."""
        return prod(self._contents.tensors[path].shape)

    def tensor(self, path: Keys) -> TensorOnDisk:
        """Return a lazy tensor."""
        found = self._contents.tensors[path]
        name = ".".join(map(str, path))
        for each in found.chunks:
            self._check(name, each, found.dtype)
        pieces = (
            Piece(each.offsets, _ChunkOnDisk(self._file(each.place), name, each, found.dtype))
            for each in found.chunks
        )
        return TensorInPieces(name, found.shape, found.dtype, pieces)

    def objects(self) -> dict[Keys, Any]:
        """Read all that is no tensor, of the types that ``torch.load(weights_only=True)`` makes; leave out others."""
        found = {}
        for path, place in self._contents.objects.items():
            with suppress(pickle.UnpicklingError):
                archive: Any = self._file(place).archive(place)
                found[path] = torch.load(archive, weights_only=True)
        return found

    def _check(self, name: str, chunk: Chunk, dtype: torch.dtype) -> None:
        """Refuse a piece of more bytes than there are at its place, before memory is taken for it."""
        place = chunk.place
        size = prod(chunk.sizes) * dtype.itemsize
        file = self._file(place)
        if min(chunk.sizes, default=0) < 0 or size > place.length or place.begin < 0:
            raise CheckpointError(
                f"{self.directory / METADATA} must list pieces as they are in its files, got {name} of shape "
                f"{list(chunk.sizes)} in {place.length:,} bytes: copy the checkpoint again"
            )
        if place.begin + place.length > file.size:
            raise CheckpointError(
                f"{file.path} must have {place.begin + place.length:,} bytes, got {file.size:,}: copy the checkpoint "
                "again"
            )

    def _file(self, place: Place) -> _File:
        if place.file not in self._files:
            check_inside(place.file, self.directory / METADATA)
            self._files[place.file] = _File(self.directory / place.file)
        return self._files[place.file]


def open_checkpoint(directory: Path) -> dict[str, TensorOnDisk]:
    """Return lazy tensors of the weights in a checkpoint, by their names in the model; raise :class:`CheckpointError`
    for one that cannot be read, or holds no weights of a model by itself.
    """
    checkpoint = DistributedCheckpoint(directory)
    tensors = {plain(str(path[-1])): checkpoint.tensor(path) for path in _weights(checkpoint)}
    if not tensors:
        raise CheckpointError(
            f"{directory} must hold the weights of a model, and holds {len(checkpoint.paths)} tensors of other kinds: "
            "give the directory that has them"
        )
    adapted = next((name for name in tensors if _ADAPTERS in name), None)
    if adapted is not None:
        raise CheckpointError(
            f"{directory} must hold a model's weights by its own names, got {adapted}, of a model in PEFT's wrapper: "
            "load it there (accelerate's load_state), and save the adapter (model.save_pretrained) beside its base"
        )
    return tensors


def optimizer_of(directory: Path) -> dict[str, Any] | None:
    """Return the state of an optimizer as its ``state_dict`` has it, with lazy tensors, and names of parameters in
    place of numbers: ``{"state": {name: {"exp_avg": ...}}, "param_groups": [{"params": [names], "lr": ...}]}``; or
    ``None`` if the checkpoint has weights alone.

    Raises:
        CheckpointError: the checkpoint holds none in this form, which FSDP2's ``get_optimizer_state_dict`` makes.
    """
    checkpoint = DistributedCheckpoint(directory)
    if _weights(checkpoint) and not any(map(_of_optimizer, checkpoint.paths)):
        return None
    found: dict[str, Any] = {"state": {}, "param_groups": []}
    groups: dict[int, dict[str, Any]] = {}
    for path, value in checkpoint.objects().items():
        match _of_optimizer(path):
            case ("param_groups", int(number), str(key)):
                groups.setdefault(number, {})[key] = value
            case ("state", str(name), str(key)):
                found["state"].setdefault(plain(name), {})[key] = value
    for path in checkpoint.paths:
        match _of_optimizer(path):
            case ("state", str(name), str(key)):
                found["state"].setdefault(plain(name), {})[key] = checkpoint.tensor(path)
            case ("param_groups", int(number), str(key)):
                groups.setdefault(number, {})[key] = checkpoint.tensor(path)[...]
    for _, group in sorted(groups.items()):
        if not isinstance(group.get("params"), list):
            continue
        names = [plain(str(name)) for name in group["params"]]
        found["param_groups"].append({**group, "params": names})
    if not found["param_groups"]:
        raise CheckpointError(
            f"{directory} must hold an optimizer's state by names of parameters, as FSDP2's get_optimizer_state_dict "
            "makes it, and holds none: train on from the weights alone"
        )
    return found


def _of_optimizer(path: Keys) -> Keys:
    """Return the part of a path within an optimizer's state dict, wherever that was saved."""
    parts = [number for number, each in enumerate(path) if each in ("state", "param_groups")]
    return path[parts[0] :] if parts and len(path) > 2 else ()


def _weights(checkpoint: DistributedCheckpoint) -> list[Keys]:
    """Return the paths of the model's tensors: of the largest dictionary that is no optimizer's."""
    groups: dict[Keys, list[Keys]] = {}
    for path in checkpoint.paths:
        if not any(_OF_OPTIMIZERS in str(each) for each in path[:-1]):
            groups.setdefault(path[:-1], []).append(path)
    return max(groups.values(), key=lambda group: sum(map(checkpoint.size, group)), default=[])


def plain(name: str) -> str:
    """Return a parameter's name without the wrappers that it was saved in."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)
