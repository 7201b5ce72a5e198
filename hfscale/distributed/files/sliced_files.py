"""Read the files that transformers' ``save_pretrained(distributed_checkpoint=True)`` writes.

Each rank writes safetensors files with its slice of every tensor. A tensor has the same name in the files of all ranks,
and the header of each file has the offsets at which its slices begin in the full tensors.
"""

import json
from pathlib import Path

from ...errors import CheckpointError
from .pieces import Piece, TensorInPieces
from .reader import SafetensorsFile, TensorOnDisk
from .weight_files import SLICED

_INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


def open_slices(directory: Path) -> dict[str, TensorOnDisk]:
    """Return a lazy tensor for every tensor of a directory; raise :class:`CheckpointError` if slices are missing."""
    pieces: dict[str, list[tuple[tuple[int, ...], TensorOnDisk]]] = {}
    for path in sorted(directory.glob(SLICED)):
        file = SafetensorsFile(path)
        offsets = _offsets(file)
        for name, tensor in file.slices().items():
            begin = offsets.get(name, (0,) * len(tensor.shape))
            if len(begin) != len(tensor.shape) or min(begin, default=0) < 0:
                raise _damaged(
                    file,
                    f"the offsets {list(begin)} of {name}, whose slice has the shape {list(tensor.shape)}",
                )
            pieces.setdefault(name, []).append((begin, tensor))
    return {name: _whole(directory, name, each) for name, each in pieces.items()}


def _offsets(file: SafetensorsFile) -> dict[str, tuple[int, ...]]:
    try:
        info = json.loads(file.metadata[_INFO])
        return {name: tuple(map(int, each[_OFFSETS])) for name, each in info.items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(file, type(error).__name__) from error


def _damaged(file: SafetensorsFile, found: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path} must have valid offsets of its slices in its header ({_INFO}), got {found}: save the checkpoint "
        "again"
    )


def _whole(
    directory: Path, name: str, pieces: list[tuple[tuple[int, ...], TensorOnDisk]]
) -> TensorOnDisk:
    ends = [
        [start + size for start, size in zip(offsets, tensor.shape, strict=True)]
        for offsets, tensor in pieces
    ]
    shape = [max(each) for each in zip(*ends, strict=True)]
    dtypes = {tensor.dtype for _, tensor in pieces}
    if len(dtypes) > 1 or len({len(end) for end in ends}) > 1:
        raise CheckpointError(
            f"{directory} must hold slices of {name} that have one dtype and the same number of dims, got "
            f"{sorted(map(str, dtypes))} with {sorted({len(end) for end in ends})} dims: save the checkpoint again"
        )
    return TensorInPieces(name, shape, dtypes.pop(), (Piece(*each) for each in pieces))
