"""Find the files with a checkpoint's weights, in the forms that are read: safetensors, else files of ``torch.save``."""

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from .reader import SafetensorsFile, TensorOnDisk

_OF_TORCH = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
SLICED = "shard-?????-model-?????-of-?????.safetensors"
"""Files that hold a slice of each tensor: :mod:`.sliced_files`."""
METADATA = ".metadata"  # of a distributed checkpoint: :mod:`.dcp`
TORCH_INDEX = "pytorch_model.bin.index.json"


def weight_files(directory: Path) -> list[Path]:
    """Return the files with full tensors in a directory: safetensors, as transformers prefers, or ``pytorch_model.bin``
    and its parts; none if there are none.
    """
    found = [
        path for path in sorted(directory.glob("*.safetensors")) if not fnmatch(path.name, SLICED)
    ]
    return found or sorted(
        path for path in directory.glob("*.bin") if _OF_TORCH.fullmatch(path.name)
    )


def open_tensors(files: Iterable[str | Path]) -> dict[str, TensorOnDisk]:
    """Return a lazy tensor for every tensor of several files."""
    tensors: dict[str, TensorOnDisk] = {}
    for file in files:
        if str(file).endswith(".bin"):
            from .torch_file import TorchFile

            tensors |= TorchFile(file).slices()
        else:
            tensors |= SafetensorsFile(file).slices()
    return tensors
