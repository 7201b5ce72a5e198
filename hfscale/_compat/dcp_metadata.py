"""Read the metadata of torch's distributed checkpoints (DCP), a pickle, without running the code that the pickle names.

Only the few classes that torch writes into these files are accepted, and instead of their objects, plain records are
created. So nothing in a file is executed, and the file may come from another version of torch.
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
    """Stand in for an object of a class, and hold the object's pickled state."""

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
        # A pickled path is the directory to which the checkpoint was written.
        if (module, name) in _RECORDS or module.partition(".")[0] == "pathlib":
            return type(name, (_Record,), {})
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"its pickle names {module}.{name}, which the metadata of a torch distributed checkpoint must not contain"
        )


@dataclass(frozen=True)
class Place:
    """Describe where torch.save wrote an object: ``length`` bytes of the checkpoint's ``file``, from byte ``begin``."""

    file: str  # path relative to the checkpoint's directory
    begin: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """Describe one chunk (a rectangular shard) of a tensor: its offsets and sizes per dim, and where it is written."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class TensorInCheckpoint:
    """Describe a tensor of a checkpoint: its dtype, its full shape, and the chunks that it is stored in."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


Keys = tuple[Any, ...]
"""Keys and indices of an entry in the nested dictionaries and lists that were saved: ``("model",
"lm_head.weight")``.
"""


@dataclass(frozen=True)
class Contents:
    """Hold the tensors and the other objects that a checkpoint lists."""

    tensors: dict[Keys, TensorInCheckpoint]
    objects: dict[Keys, Place]  # everything except tensors


def contents_of(metadata: Path) -> Contents:
    """Return the contents that a checkpoint's ``.metadata`` lists.

    Raises:
        ValueError: the chunks were transformed (compressed): torch reads them only with the same extensions.
        Exception: errors of pickle, or for missing fields, if the file is damaged or of another kind.
    """
    with metadata.open("rb") as file:
        found = _Reader(file).load()
    places: dict[Any, Place] = {}
    for index, info in found["storage_data"].items():
        if info["transform_descriptors"]:
            raise ValueError(
                f"the files of the checkpoint are transformed (compressed) by {info['transform_descriptors']}, which "
                "hfscale does not read"
            )
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
