"""Find the weight files of a checkpoint directory: safetensors files or, without them, files of ``torch.save``."""

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from .reader import SafetensorsFile, TensorOnDisk

_OF_TORCH = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
SLICED = "shard-?????-model-?????-of-?????.safetensors"
"""Pattern of the names of files that hold one rank's slice of every tensor: see :mod:`.sliced_files`."""
METADATA = ".metadata"  # the index file of a distributed checkpoint: see :mod:`.dcp`
TORCH_INDEX = "pytorch_model.bin.index.json"


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files of a directory that hold full tensors; an empty list if it has none.

    Like transformers, prefer safetensors files to ``pytorch_model.bin`` and ``pytorch_model-*-of-*.bin``.
    """
    found = [
        path for path in sorted(directory.glob("*.safetensors")) if not fnmatch(path.name, SLICED)
    ]
    return found or sorted(
        path for path in directory.glob("*.bin") if _OF_TORCH.fullmatch(path.name)
    )


def open_tensors(files: Iterable[str | Path]) -> dict[str, TensorOnDisk]:
    """Return lazy tensors, by name, of all tensors in several files."""
    tensors: dict[str, TensorOnDisk] = {}
    for file in files:
        if str(file).endswith(".bin"):
            from .torch_file import TorchFile

            tensors |= TorchFile(file).slices()
        else:
            tensors |= SafetensorsFile(file).slices()
    return tensors
