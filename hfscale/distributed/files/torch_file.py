"""Read slices of files of ``torch.save`` (``pytorch_model.bin``, transformers' checkpoint format before safetensors).

Such a file is a zip archive whose entries are not compressed. A tensor's bytes have the same order in the file as in
memory, so slices are read by their byte offsets, like those of a safetensors file.
"""

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..._compat.torch_files import PlaceInFile, places_in_file
from ...errors import CheckpointError
from .reader import NAMES, Box, BytesOnDisk, TensorOnDisk, box_slices


class TorchFile(BytesOnDisk):
    """Read tensors of a file of ``torch.save`` on demand; raise :class:`CheckpointError` if the file is unreadable."""

    def __init__(self, path: str | Path) -> None:
        try:
            super().__init__(path)
            self.places = places_in_file(self.path)
        except CheckpointError:  # the file does not exist
            raise
        except Exception as error:
            # torch raises errors of many classes for damaged files and for objects that it refuses to load.
            reason = _reason(error)
            raise CheckpointError(
                f"{self.path} must hold tensors by name, in the format of torch.save since 1.6, but cannot be read "
                f"({reason}): download the file again, or convert it once with "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            ) from error

    def slices(self) -> dict[str, TensorOnDisk]:
        """Return a lazy tensor for every tensor of the file."""
        return {name: TensorInTorchFile(self, name, place) for name, place in self.places.items()}


class TensorInTorchFile(TensorOnDisk):
    """Read one tensor of a file of ``torch.save`` lazily."""

    def __init__(self, file: BytesOnDisk, name: str, place: PlaceInFile) -> None:
        if place.dtype not in NAMES:
            known = ", ".join(sorted(NAMES.values()))
            raise CheckpointError(
                f"{file.path}: {name} has the dtype {place.dtype}, which hfscale does not read: convert it to one of "
                f"{known}"
            )
        self._file = file
        self._place = place
        self.shape = place.shape
        self.dtype = place.dtype
        self._begin = place.begin

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``, one ``(start, stop)`` per dim; a tensor that is not contiguous is read in
        full first.
        """
        if self.shape != self._place.shape or _is_contiguous(self._place):
            return super().read(spans)
        sizes = zip(self._place.shape, self._place.stride, strict=True)
        entries = 1 + sum((size - 1) * stride for size, stride in sizes) if prod(self.shape) else 0
        memory = torch.empty(entries, dtype=self.dtype)
        self._file.read(self._begin, memory)
        whole = memory.as_strided(self._place.shape, self._place.stride)
        return whole[box_slices(spans)].clone(memory_format=torch.contiguous_format)


def _reason(error: Exception) -> str:
    """Return the line of an error of ``torch.load`` that gives the cause; its first lines only explain how to load the
    file anyway.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "Unsupported" in line), lines[0])


def _is_contiguous(place: PlaceInFile) -> bool:
    expected = 1
    for size, stride in zip(reversed(place.shape), reversed(place.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
