"""Read slices of files of ``torch.save``, as transformers wrote checkpoints before safetensors (``pytorch_model.bin``).

Such a file is a zip archive whose entries are not compressed, so that a tensor's bytes lie in it as they lie in memory:
they are read as those of a safetensors file are, by their place alone.
"""

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..._compat.torch_files import PlaceInFile, places_in_file
from ...errors import CheckpointError
from .reader import NAMES, Box, BytesOnDisk, TensorOnDisk


class TorchFile(BytesOnDisk):
    """Read tensors of a file of ``torch.save`` on demand; raise :class:`CheckpointError` if that cannot be."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        try:
            self._open()
            self.places = places_in_file(self.path)
        except CheckpointError:  # it is not there
            raise
        except Exception as error:
            # Whatever torch says of a damaged file, or of types that it does not make.
            reason = _reason(error)
            raise CheckpointError(
                f"{self.path} must hold tensors by name, as torch.save writes them since 1.6 ({reason}): download it "
                "again, or convert it once with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            ) from error

    def slices(self) -> dict[str, TensorOnDisk]:
        """Return a lazy tensor for every tensor of the file."""
        return {name: TensorInTorchFile(self, name, place) for name, place in self.places.items()}


class TensorInTorchFile(TensorOnDisk):
    """One tensor of a file of ``torch.save``."""

    def __init__(self, file: BytesOnDisk, name: str, place: PlaceInFile) -> None:
        if place.dtype not in NAMES:
            known = ", ".join(sorted(NAMES.values()))
            raise CheckpointError(
                f"{file.path}: {name} has the type {place.dtype}, which hfscale does not read: convert it to one of "
                f"{known}"
            )
        self._file = file
        self._place = place
        self.shape = place.shape
        self.dtype = place.dtype
        self._begin = place.begin

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``; of a tensor that is not contiguous, all that its strides span is read."""
        if self.shape != self._place.shape or _is_contiguous(self._place):
            return super().read(spans)
        sizes = zip(self._place.shape, self._place.stride, strict=True)
        entries = 1 + sum((size - 1) * stride for size, stride in sizes) if prod(self.shape) else 0
        memory = torch.empty(entries, dtype=self.dtype)
        self._file.read(self._begin, memory)
        whole = memory.as_strided(self._place.shape, self._place.stride)
        return whole[tuple(slice(start, stop) for start, stop in spans)].clone(
            memory_format=torch.contiguous_format
        )


def _reason(error: Exception) -> str:
    """Return the line of an error that says what is wrong; torch's first ones say how to load it all the same."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "Unsupported" in line), lines[0])


def _is_contiguous(place: PlaceInFile) -> bool:
    expected = 1
    for size, stride in zip(reversed(place.shape), reversed(place.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
