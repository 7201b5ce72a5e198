"""Find out what a file of ``torch.save`` holds, and where, without reading its tensors."""

from collections.abc import Mapping
from io import IOBase
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


class PlaceInFile(NamedTuple):
    """Say where a tensor lies in a file: its first entry is at byte ``begin``, and strides count entries."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int


def places_in_file(path: Path) -> dict[str, PlaceInFile]:
    """Return where the tensors of a saved mapping lie; values that are no tensors are left out. Nothing but the types
    that ``weights_only=True`` allows is made, and fake tensors have no memory.

    Raises:
        ValueError: the file holds no mapping, or is not in the zip format that torch writes since 1.6.
        Exception: of torch, for a file that is damaged, or holds other types.
    """
    found = _load_without_memory(path)
    if not isinstance(found, Mapping):
        raise ValueError(f"it holds a {type(found).__name__}, and no mapping of names to tensors")
    return {
        str(name): _place_of(tensor) for name, tensor in found.items() if isinstance(tensor, Tensor)
    }


def place_of_tensor(archive: IO[bytes] | IOBase, begin: int) -> PlaceInFile:
    """Return where the tensor of an archive of ``torch.save`` lies in a file that has it from byte ``begin`` on; errors
    as for :func:`places_in_file`.
    """
    found = _load_without_memory(archive)
    if not isinstance(found, Tensor):
        raise ValueError(f"it holds a {type(found).__name__}, and no tensor")
    place = _place_of(found)
    return place._replace(begin=begin + place.begin)


def _load_without_memory(source: Any) -> Any:
    with FakeTensorMode():
        return torch.load(source, map_location="cpu", weights_only=True)


def _place_of(tensor: Tensor) -> PlaceInFile:
    storage: Any = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if start is None:
        raise ValueError("it is in the format of torch before 1.6")
    begin = int(start) + int(tensor.storage_offset()) * tensor.dtype.itemsize
    return PlaceInFile(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), begin)
