"""Stream safetensors files whose contents arrive one tensor at a time, in any order.

safetensors' own writer wants every tensor in memory at once. The format is simple: eight bytes with the length of a
JSON header that gives each tensor's type, shape and place, then the bytes.
"""

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from torch import Tensor

from .reader import NAMES

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_STALE = ("model*.safetensors", INDEX, "pytorch_model*.bin", "pytorch_model.bin.index.json")


class CheckpointWriter:
    """Writes ``contents`` (stored name -> meta tensor) under ``target``, through a staging directory inside it."""

    def __init__(self, target: Path, contents: dict[str, Tensor], max_shard_size: str | int) -> None:
        self.target, self.staging = target, target / ".incomplete"
        self.staging.mkdir(parents=True, exist_ok=True)
        split = _split(contents, max_shard_size)
        self._index = None
        if split.is_sharded:
            self._index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        self._files: dict[str, _File] = {}
        for file, names in split.filename_to_tensors.items():
            opened = _File(self.staging / file, {name: contents[name] for name in names})
            self._files.update(dict.fromkeys(names, opened))

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor; its shape and type are those announced."""
        self._files[name].write(name, tensor)

    def finish(self) -> None:
        """Move everything into place: earlier weights go first, the index that makes shards a model comes last."""
        for file in set(self._files.values()):
            file.close()
        for pattern in _STALE:
            for old in self.target.glob(pattern):
                old.unlink()
        for file_path in sorted(self.staging.iterdir()):
            os.replace(file_path, self.target / file_path.name)
        if self._index is not None:
            temporary = self.staging / INDEX
            temporary.write_text(json.dumps(self._index, indent=2, sort_keys=True) + "\n")
            os.replace(temporary, self.target / INDEX)


def _split(contents: dict[str, Tensor], max_shard_size: str | int) -> StateDictSplit:
    return split_state_dict_into_shards_factory(
        contents,
        get_storage_size=lambda tensor: prod(tensor.shape) * tensor.dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )


class _File:
    def __init__(self, path: Path, contents: dict[str, Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, tensor in contents.items():
            size = prod(tensor.shape) * tensor.dtype.itemsize
            entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
            header[name], offset = entry, offset + size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._places = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in contents}
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(8 + len(text) + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        self._file.seek(self._places[name])
        self._file.write(memoryview(data))

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
