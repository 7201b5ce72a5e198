"""Find out what a file of ``torch.save`` holds, and where, without reading its tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
    with FakeTensorMode():
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, Mapping):
        raise ValueError(f"it holds a {type(found).__name__}, and no mapping of names to tensors")
    return {
        str(name): _place_of(tensor) for name, tensor in found.items() if isinstance(tensor, Tensor)
    }


def _place_of(tensor: Tensor) -> PlaceInFile:
    storage: Any = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if start is None:
        raise ValueError("it is in the format of torch before 1.6")
    begin = int(start) + int(tensor.storage_offset()) * tensor.dtype.itemsize
    return PlaceInFile(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), begin)
