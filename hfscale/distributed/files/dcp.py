"""Read torch's distributed checkpoints (DCP), which plain FSDP2 training loops, Accelerate and Trainer write.

``.metadata`` lists the chunks of every tensor. A chunk is in a file of the rank that wrote it, in the format in which
``torch.save`` writes one tensor, and its bytes are located without reading the rest of the file::

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
from .reader import NAMES, Box, BytesOnDisk, TensorOnDisk
from .torch_file import TensorInTorchFile
from .weight_files import METADATA

_OF_OPTIMIZERS = "optim"
# Parts that wrappers (``torch.compile``, FSDP, activation checkpointing) add to the names of parameters.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ADAPTERS = ".base_layer."


class _File(BytesOnDisk):
    """Read a file that holds several tensors or objects, each as an archive that ``torch.save`` wrote."""

    def archive(self, place: Place) -> "_Window":
        """Return the archive at ``place``, one of several in this file, as a file object."""
        return _Window(self._file.fileno(), place)


class _Window(io.RawIOBase):
    """Present one archive of ``torch.save``, which is only a part of an open file, as a file of its own."""

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


class _ChunkOnDisk(TensorOnDisk):
    """Read one chunk of a tensor lazily: the chunk's data is located in its file at the first read."""

    def __init__(self, file: _File, name: str, chunk: Chunk, dtype: torch.dtype) -> None:
        self.shape = chunk.sizes
        self.dtype = dtype
        self._archives = file
        self._name = name
        self._place = chunk.place

    def read(self, spans: Box) -> Tensor:
        """Return a copy of a box of this chunk: ``spans`` has one ``(start, stop)`` per dim, in indices of the
        chunk.
        """
        return self._tensor.read(spans)

    @cached_property
    def _tensor(self) -> TensorOnDisk:
        archive = self._archives.archive(self._place)
        try:
            place = place_of_tensor(archive, self._place.begin)
            if (place.dtype, place.shape) != (self.dtype, self.shape):
                raise ValueError(
                    f"the tensor has dtype {place.dtype} and shape {list(place.shape)}"
                )
        except Exception as error:  # torch raises errors of many classes for a damaged archive
            raise CheckpointError(
                f"{self._archives.path} must hold {self._name} with dtype {self.dtype} and shape {list(self.shape)} at "
                f"byte {self._place.begin}, but does not ({first_line(error)}): copy the checkpoint again"
            ) from error
        return TensorInTorchFile(self._archives, self._name, place)


class DistributedCheckpoint:
    """Read the tensors and objects of a distributed checkpoint.

    Raises:
        CheckpointError: the metadata cannot be read, or list a dtype that hfscale does not read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, _File] = {}
        metadata = directory / METADATA
        try:
            self._contents = contents_of(metadata)
            unknown = {each.dtype for each in self._contents.tensors.values()} - NAMES.keys()
            if unknown:
                raise ValueError(
                    f"the checkpoint has a tensor of dtype {unknown.pop()}, which hfscale does not read"
                )
        except Exception as error:  # unpickling raises errors of many classes
            raise CheckpointError(
                f"{metadata} must be the metadata of a torch distributed checkpoint, but cannot be read "
                f"({first_line(error)}): copy the checkpoint again, or merge it where it was written (python -m "
                f"torch.distributed.checkpoint.format_utils dcp_to_torch {directory} OUT.pt)"
            ) from error

    @property
    def paths(self) -> list[Keys]:
        """Return the path of each tensor: its keys in the nested dictionaries that were saved."""
        return list(self._contents.tensors)

    def size(self, path: Keys) -> int:
        """Return the number of entries of the tensor at ``path``."""
        return prod(self._contents.tensors[path].shape)

    def tensor(self, path: Keys) -> TensorOnDisk:
        """Return a lazy tensor for the tensor at ``path`` in the nested dictionaries that were saved."""
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
        """Return the saved values that are not tensors, by their paths in the nested dictionaries that were saved.

        Values of classes that ``torch.load(weights_only=True)`` refuses are left out.
        """
        found = {}
        for path, place in self._contents.objects.items():
            with suppress(pickle.UnpicklingError):
                archive: Any = self._file(place).archive(place)
                found[path] = torch.load(archive, weights_only=True)
        return found

    def _check(self, name: str, chunk: Chunk, dtype: torch.dtype) -> None:
        """Raise :class:`CheckpointError` if a chunk needs more bytes than its archive or its file has, before memory is
        allocated for it.
        """
        place = chunk.place
        size = prod(chunk.sizes) * dtype.itemsize
        file = self._file(place)
        if min(chunk.sizes, default=0) < 0 or size > place.length or place.begin < 0:
            raise CheckpointError(
                f"{self.directory / METADATA} must list each chunk of a tensor with the size that it has in its file, "
                f"got a chunk of {name} with shape {list(chunk.sizes)} in {place.length:,} bytes: copy the checkpoint "
                "again"
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
    """Return lazy tensors of the model's weights in a checkpoint, by their names in the model.

    Raises:
        CheckpointError: the checkpoint cannot be read, has no model weights, or has weights of a PEFT model.
    """
    checkpoint = DistributedCheckpoint(directory)
    tensors = {plain(str(path[-1])): checkpoint.tensor(path) for path in _weights(checkpoint)}
    if not tensors:
        raise CheckpointError(
            f"{directory} must hold the weights of a model, but none of its {len(checkpoint.paths)} tensors is one: "
            "pass the directory that has the weights"
        )
    adapted = next((name for name in tensors if _ADAPTERS in name), None)
    if adapted is not None:
        raise CheckpointError(
            f"{directory} must hold weights under the names of a plain model, got {adapted}, a name in a model that "
            "PEFT has wrapped: load the checkpoint into the wrapped model (accelerate's load_state), save the adapter "
            "alone (model.save_pretrained), and load the base model with that adapter"
        )
    return tensors


def optimizer_of(directory: Path) -> dict[str, Any] | None:
    """Return the state dict of the optimizer in a checkpoint, with lazy tensors, or ``None`` if the checkpoint has only
    weights.

    Its structure is that of FSDP2's ``get_optimizer_state_dict``, which names parameters instead of numbering them:
    ``{"state": {name: {"exp_avg": ...}}, "param_groups": [{"params": [names], "lr": ...}]}``.

    Raises:
        CheckpointError: the checkpoint has no optimizer state of this structure.
    """
    checkpoint = DistributedCheckpoint(directory)
    if _weights(checkpoint) and not any(map(_of_optimizer, checkpoint.paths)):
        return None
    found: dict[str, Any] = {"state": {}, "param_groups": []}
    groups: dict[int, dict[str, Any]] = {}
    tensors = {path: checkpoint.tensor(path) for path in filter(_of_optimizer, checkpoint.paths)}
    for path, value in {**checkpoint.objects(), **tensors}.items():
        match _of_optimizer(path):
            case ("state", str(name), str(key)):
                found["state"].setdefault(plain(name), {})[key] = value
            case ("param_groups", int(number), str(key)):
                held = value[...] if isinstance(value, TensorOnDisk) else value
                groups.setdefault(number, {})[key] = held
    for _, group in sorted(groups.items()):
        if not isinstance(group.get("params"), list):
            continue
        names = [plain(str(name)) for name in group["params"]]
        found["param_groups"].append({**group, "params": names})
    if not found["param_groups"]:
        raise CheckpointError(
            f"{directory} must hold an optimizer's state by parameter names, as FSDP2's get_optimizer_state_dict "
            "returns it, but holds none: continue training from the weights alone"
        )
    return found


def _of_optimizer(path: Keys) -> Keys:
    """Return the part of a path that begins with ``"state"`` or ``"param_groups"``, keys of an optimizer's state dict;
    empty if the path has neither.
    """
    parts = [number for number, each in enumerate(path) if each in ("state", "param_groups")]
    return path[parts[0] :] if parts and len(path) > 2 else ()


def _weights(checkpoint: DistributedCheckpoint) -> list[Keys]:
    """Return the paths of the model's tensors in a checkpoint: of the saved dictionaries that are not an optimizer's,
    the one with the most entries is taken to be the model's.
    """
    groups: dict[Keys, list[Keys]] = {}
    for path in checkpoint.paths:
        if not any(_OF_OPTIMIZERS in str(each) for each in path[:-1]):
            groups.setdefault(path[:-1], []).append(path)
    return max(groups.values(), key=lambda group: sum(map(checkpoint.size, group)), default=[])


def plain(name: str) -> str:
    """Return a parameter's name without the components that wrappers add to it, such as ``_orig_mod``
    (``torch.compile``) and ``module`` (DDP).
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)
