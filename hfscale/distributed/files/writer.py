"""Write safetensors files one tensor at a time, in any order.

safetensors' own writer needs all tensors in memory at once. The format is simple: eight bytes with the length of a
JSON header, the header with each tensor's dtype, shape and offsets, and the data.
"""

import json
import zlib
from collections.abc import Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from ...errors import CheckpointError
from .complete import FileSum
from .directories import sync
from .reader import NAMES, TensorOnDisk
from .replace import ADAPTER_CONFIG

Shaped = Tensor | TensorOnDisk  # used for its shape and dtype

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARDS = "-?????-of-?????"
STALE = (
    WEIGHTS,
    f"model{_SHARDS}.safetensors",
    INDEX,
    "pytorch_model.bin",
    f"pytorch_model{_SHARDS}.bin",
    "pytorch_model.bin.index.json",
)
"""Patterns of the names of weight files from an earlier save, which transformers might load instead of the files that a
:class:`CheckpointWriter` writes.
"""

# safetensors' names of dtypes in the order in which its own serializer writes tensors: the largest dtype first. Every
# tensor then begins at a multiple of its itemsize, which readers that map files to a GPU rely on.
_ORDER = (
    "U64",
    "I64",
    "F64",
    "C64",
    "F32",
    "U32",
    "I32",
    "BF16",
    "F16",
    "U16",
    "I16",
    "F8_E8M0",
    "F8_E4M3",
    "F8_E5M2",
    "I8",
    "U8",
    "BOOL",
)
REPLACED = (*STALE, ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")
"""Patterns of the names of weight files and adapters from an earlier save; transformers would load the adapters on top
of the new weights.
"""


class CheckpointWriter:
    """Write the weights of a checkpoint to safetensors files in ``directory``, one tensor at a time, in any order.
    ``contents`` are the shape and dtype of every tensor, by name.

    The index records the number of ``parameters`` of the model, by default the number of entries of all tensors.
    """

    def __init__(
        self,
        directory: Path,
        contents: Mapping[str, Shaped],
        max_shard_size: str | int,
        parameters: int | None = None,
    ) -> None:
        self.directory = directory
        try:
            split = split_state_dict_into_shards_factory(
                dict[str, Any](contents),
                get_storage_size=lambda tensor: prod(tensor.shape) * tensor.dtype.itemsize,
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=max_shard_size,
            )
        except ValueError as error:
            raise CheckpointError(
                f"max_shard_size={max_shard_size!r} is not a size: use a number of bytes, or a string like '5GB' "
                f"({error})"
            ) from error
        self._index = None
        if split.is_sharded:
            count = (
                sum(prod(tensor.shape) for tensor in contents.values())
                if parameters is None
                else parameters
            )
            metadata = {"total_parameters": count, **split.metadata}
            self._index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        self._missing, self._places = dict(contents), dict[str, tuple[Path, int]]()
        for file, names in split.filename_to_tensors.items():
            header, places, size = safetensors_header({name: contents[name] for name in names})
            with (directory / file).open("wb") as opened:
                opened.write(header)
                opened.truncate(size)
            self._places |= {name: (directory / file, place) for name, place in places.items()}

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one of the announced tensors to its file.

        Raises:
            CheckpointError: no tensor of this name was announced, it has another shape or dtype than announced, or it
                was written already.
        """
        if name not in self._missing:
            raise CheckpointError(
                f"{name} was written already, or is not among the tensors that this checkpoint was opened with: add "
                "each of these tensors once"
            )
        expected = self._missing[name]
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            raise CheckpointError(
                f"{name} must be added as {_describe(expected)}, as it was listed when the checkpoint was opened, got "
                f"{_describe(tensor)}: convert it first"
            )
        path, place = self._places[name]
        with path.open(
            "r+b"
        ) as file:  # opened anew for each tensor, so that a save that fails leaves no file open
            file.seek(place)
            file.write(bytes_of(tensor))
        del self._missing[name]

    def finish(self) -> None:
        """Write the index, if there are several files; raise :class:`CheckpointError` if an announced tensor was never
        added.
        """
        if self._missing:
            raise CheckpointError(
                f"these tensors were not written: {', '.join(self._missing)}: add them before the checkpoint is "
                "finished"
            )
        if self._index is not None:
            (self.directory / INDEX).write_text(
                json.dumps(self._index, indent=2, sort_keys=True) + "\n"
            )


def _describe(tensor: Shaped) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def safetensors_header(contents: Mapping[str, Shaped]) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a safetensors file for the tensors ``contents`` as bytes, the offset of each tensor in the
    file, and the size of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in in_order(contents):
        size = prod(tensor.shape) * tensor.dtype.itemsize
        entry = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        header[name], offset = entry, offset + size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    places = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in contents}
    return len(text).to_bytes(8, "little") + text, places, 8 + len(text) + offset


def in_order(contents: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return names and tensors in the order in which safetensors' own writer stores them: by dtype, then by name."""
    for name, tensor in contents.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{name} has the dtype {tensor.dtype}, which safetensors files cannot hold: convert this tensor to "
                "another dtype"
            )
    places = {name: place for place, name in enumerate(_ORDER)}
    return sorted(
        contents.items(),
        key=lambda each: (places[NAMES[each[1].dtype]], each[0]),
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, copied to the CPU if necessary."""
    data: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileSum:
    """Write a safetensors file from front to back, one tensor at a time, and fsync it; return its size and checksum."""
    header, _, size = safetensors_header(tensors)
    crc = 0
    with path.open("wb") as file:
        stored = (bytes_of(tensor) for _, tensor in in_order(tensors))
        for content in chain([memoryview(header)], stored):
            file.write(content)
            crc = zlib.crc32(content, crc)
    sync(path)
    return FileSum(size, crc)
