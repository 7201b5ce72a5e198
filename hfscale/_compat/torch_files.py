"""Find out which tensors a file of ``torch.save`` contains, and where, without reading the tensors."""

import struct
import zipfile
from collections.abc import Mapping
from io import IOBase
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

_NAME_LENGTH = 26  # offset, in an entry's header, of the lengths of name and extra field


class PlaceInFile(NamedTuple):
    """Describe where a tensor is in a file: its first entry is at byte ``begin``; strides count entries."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int


def places_in_file(path: Path) -> dict[str, PlaceInFile]:
    """Return where in the file each tensor of a saved mapping is, by the mapping's keys; values that are no tensors are
    left out. Only objects of types that ``weights_only=True`` allows are created, and the tensors are fake, without
    memory.

    Raises:
        ValueError: the file contains no mapping, or is not in the zip format that torch writes since 1.6.
        Exception: errors of torch, if the file is damaged or contains other types.
    """
    found = _load_without_memory(path)
    entries = _entries_of(path)
    if not isinstance(found, Mapping):
        raise ValueError(
            f"the file contains a {type(found).__name__}, but must contain a mapping of names to tensors"
        )
    return {
        str(name): _place_of(tensor, entries)
        for name, tensor in found.items()
        if isinstance(tensor, Tensor)
    }


def structure_of_file(path: Path, library: str) -> Any:
    """Return the contents of a file of ``torch.save``, with a :class:`PlaceInFile` instead of each tensor. Objects of
    classes of ``library`` are replaced by empty objects, so nothing of the library is imported or run. Raises like
    :func:`places_in_file`.
    """
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    own = [name for name in names if name.startswith(f"{library}.")]
    stand_ins: list[Any] = [(type("_StandIn", (_StandIn,), {}), name) for name in own]
    with torch.serialization.safe_globals(stand_ins):
        return _with_places(_load_without_memory(path), _entries_of(path))


def place_of_tensor(archive: IO[bytes] | IOBase, begin: int) -> PlaceInFile:
    """Return where in a file the data of a tensor are that torch.save wrote alone, as an archive that begins at byte
    ``begin`` of the file. Raises like :func:`places_in_file`.
    """
    found = _load_without_memory(archive)
    if not isinstance(found, Tensor):
        raise ValueError(f"the stored object must be a tensor, got a {type(found).__name__}")
    place = _place_of(found, _entries_of(archive))
    return PlaceInFile(place.dtype, place.shape, place.stride, begin + place.begin)


class _StandIn:
    """Replace an object whose class is not imported when a file is read, and discard the object's state."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _with_places(value: Any, entries: Mapping[int, int]) -> Any:
    if isinstance(value, Tensor):
        return _place_of(value, entries)
    if isinstance(value, Mapping):
        return {key: _with_places(each, entries) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_places(each, entries) for each in value)
    return value


def _load_without_memory(source: Any) -> Any:
    with FakeTensorMode():
        return torch.load(source, map_location="cpu", weights_only=True)


def _entries_of(archive: Any) -> dict[int, int]:
    """Map the byte at which an uncompressed entry of an archive begins to the entry's length in bytes."""
    found = {}
    with zipfile.ZipFile(archive) as opened:
        file: Any = opened.fp
        for entry in opened.infolist():
            file.seek(entry.header_offset + _NAME_LENGTH)
            name, extra = struct.unpack("<HH", file.read(4))
            start = entry.header_offset + _NAME_LENGTH + 4 + name + extra
            if entry.compress_type == zipfile.ZIP_STORED:
                found[start] = entry.file_size
    return found


def _place_of(tensor: Tensor, entries: Mapping[int, int]) -> PlaceInFile:
    storage: Any = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if start is None:
        raise ValueError(
            "the file has the format of torch before 1.6, but must have the zip format that newer versions write"
        )
    if storage.nbytes() > entries.get(int(start), -1):  # do not trust the size in the pickle
        raise ValueError(
            f"the file must store {storage.nbytes()} bytes without compression for its tensor of shape "
            f"{list(tensor.shape)}, but does not"
        )
    begin = int(start) + int(tensor.storage_offset()) * tensor.dtype.itemsize
    return PlaceInFile(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), begin)
