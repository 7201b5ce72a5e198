"""Read the metadata of torch's distributed checkpoints (DCP), which is a pickle, without running what it names.

Only the few classes that torch writes there are known by name, and stand-ins are made in their place, so that nothing
of a file is executed, and other versions of torch may have written it.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
_PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


class _Record:
    """Stand for an object of a class, and hold what its pickle says of it."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.state = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, Mapping) else None


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        # A path is that of the directory it was written to.
        if (module, name) in _RECORDS or module.partition(".")[0] == "pathlib":
            return type(name, (_Record,), {})
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which such a file does not hold")


@dataclass(frozen=True)
class Place:
    """Say where torch.save wrote an object: ``length`` bytes at ``begin`` of a file."""

    file: str  # relative to the directory
    begin: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """Describe one piece of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class TensorInCheckpoint:
    """Describe a tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


Keys = tuple[Any, ...]
"""Say where something was in the nested dictionaries and lists that were saved: ``("model", "lm_head.weight")``."""


@dataclass(frozen=True)
class Contents:
    """Hold what a checkpoint lists."""

    tensors: dict[Keys, TensorInCheckpoint]
    objects: dict[Keys, Place]  # all that is no tensor


def contents_of(metadata: Path) -> Contents:
    """Return what a checkpoint's ``.metadata`` lists.

    Raises:
        ValueError: chunks were transformed (compressed), which torch reads with the same extensions alone.
        Exception: of pickle or of a missing field, for a file that is damaged or of another kind.
    """
    with metadata.open("rb") as file:
        found = _Reader(file).load()
    places: dict[Any, Place] = {}
    for index, info in found["storage_data"].items():
        if info["transform_descriptors"]:
            raise ValueError(f"its files are transformed by {info['transform_descriptors']}")
        place = Place(info["relative_path"], int(info["offset"]), int(info["length"]))
        places[index["fqn"], _numbers(index["offset"] or ())] = place
    paths = found["planner_data"] or {}
    contents = Contents({}, {})
    for name, entry in found["state_dict_metadata"].items():
        path = tuple(paths.get(name, (name,)))
        if entry["size"] is None:
            contents.objects[path] = places[name, ()]
            continue
        chunks = (
            Chunk(
                offsets := _numbers(each["offsets"]), _numbers(each["sizes"]), places[name, offsets]
            )
            for each in entry["chunks"]
        )
        dtype = entry["properties"].state[0]
        contents.tensors[path] = TensorInCheckpoint(dtype, _numbers(entry["size"]), tuple(chunks))
    return contents


def _numbers(size: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(each) for each in size)
