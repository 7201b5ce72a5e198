"""Read slices of safetensors files, and this rank's shards, as lazy tensors that read the file when they are indexed.

The file is not mapped, and full tensors are not read. ``safetensors.safe_open`` either maps the file, so that every
page that a slice touches counts as memory of the process until the kernel reclaims it, or (``backend="pread"``) reads
the full tensor to return a slice. Here a slice along the first dim is one ``pread`` of exactly its bytes, and any other
slice is read in row blocks of a few MiB.
"""

import json
import os
from collections.abc import Sequence
from copy import copy
from io import FileIO
from itertools import accumulate, pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...plan import Cut, Plan
from ...plan.cut import Spans, share_spans
from .directories import check_inside, leads_out

Box = tuple[tuple[int, int], ...]
"""A box in a tensor: one ``(start, stop)`` per dim."""

_FLOATS = (torch.float64, torch.float32, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_UNSIGNED = (torch.uint64, torch.uint32, torch.uint16, torch.uint8)
_BY_BITS = {"F": _FLOATS, "I": _INTEGERS, "U": _UNSIGNED}
_DTYPES = {
    f"{kind}{8 * each.itemsize}": each for kind, dtypes in _BY_BITS.items() for each in dtypes
}
_DTYPES |= {"BF16": torch.bfloat16, "C64": torch.complex64, "BOOL": torch.bool}
_DTYPES |= {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BLOCK_BYTES = 8 << 20
# the largest header that safetensors accepts, and a limit on sizes that torch can represent
_MOST_HEADER = 100_000_000
_MOST_ROWS = 1 << 62
_SUM_BYTES = 64 << 20


class BytesOnDisk:
    """Read bytes of a file by their offset, without mapping the file into memory.

    Raises:
        CheckpointError: the file does not exist.
        ValueError: the path is not a regular file.
    """

    _file: FileIO
    _start = 0  # byte of the file at which offsets begin

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # opening a pipe would wait for its writer
        if self.path.exists() and not self.path.is_file():
            raise ValueError("the path is no regular file")
        try:
            self._file = self.path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.path} does not exist: download or save the checkpoint again"
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, buffer: Tensor) -> None:
        """Fill the contiguous tensor ``buffer`` with the bytes of the file from ``offset`` on."""
        array: Any = buffer.view(-1).view(torch.uint8).numpy()
        view = memoryview(array)
        done = 0
        while done < len(view):
            count = os.preadv(
                self._file.fileno(),
                [view[done:]],
                self._start + offset + done,
            )
            if count <= 0:
                raise CheckpointError(
                    f"{self.path} ended early while it was read: download or save it again"
                )
            done += count


class SafetensorsFile(BytesOnDisk):
    """Read tensors of a safetensors file on demand.

    Raises:
        CheckpointError: the file does not exist, or is not a complete safetensors file.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            super().__init__(path)
            self.header, self._start = _header(self._file)
            self.metadata = self.header.pop("__metadata__", {})
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"{self.path} is truncated or not a safetensors file ({error}): download or save it again"
            ) from error

    def slices(self) -> dict[str, "TensorOnDisk"]:
        """Return a lazy tensor for every tensor of the file."""
        return {name: TensorOnDisk(self, name) for name in self.header}


def named_files(index: Path) -> list[Path]:
    """Return the files that a checkpoint's index names.

    Raises:
        CheckpointError: the index is damaged, or names a file outside of its directory.
    """
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged ({error}): download or save it again") from error
    for name in names:
        check_inside(name, index)
        if leads_out(index.parent / name, index):
            raise CheckpointError(
                f"{index} names {name}, a link to a file elsewhere: replace the link by a copy of the file, or by a "
                "hard link"
            )
    return [index.parent / name for name in sorted(names)]


def _header(file: FileIO) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file (tensor name -> entry), and the offset at which the tensors' data begins,
    both checked against the file's size.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    if not 2 <= length <= min(size - 8, _MOST_HEADER):
        raise ValueError(
            f"it claims to have a header of {length} bytes, but has {size} bytes in all"
        )
    header: dict[str, Any] = json.loads(
        os.pread(file.fileno(), length, 8), object_pairs_hook=_each_once
    )
    entries = (entry for name, entry in header.items() if name != "__metadata__")
    end = 0
    for entry in sorted(entries, key=lambda entry: entry["data_offsets"]):
        start, stop = entry["data_offsets"]
        if not {"dtype", "shape"} <= entry.keys():
            raise ValueError(
                f"its header gives the tensor in bytes {start} to {stop} no dtype or no shape"
            )
        if start != end or stop < start or type(start) is not int or type(stop) is not int:
            raise ValueError(
                f"its header places a tensor in bytes {start} to {stop}, but the previous tensor ends at byte {end}"
            )
        shape = entry["shape"]
        if not isinstance(entry["dtype"], str) or not all(
            type(n) is int and 0 <= n < _MOST_ROWS for n in shape
        ):
            raise ValueError(
                f"its header gives a tensor the shape {shape!r} and dtype {entry['dtype']!r}, of which one is invalid"
            )
        end = stop
    if 8 + length + end != size:
        raise ValueError(
            f"its header describes {8 + length + end} bytes, but the file has {size} bytes"
        )
    return header, 8 + length


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the ``pairs`` of a JSON object as a dict; raise ``ValueError`` for a name that occurs twice, because
    parsers disagree on which of the values counts.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"two entries of the JSON file have the name {next(name for name in names if names.count(name) > 1)!r}"
        )
    return found


class _OnDisk:
    """Base class of lazy tensors with the interface of safetensors' slices (``get_shape``, ``get_dtype``, indexing):
    indexing reads from the file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor as a list."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the name that safetensors has for the tensor's dtype, such as ``"BF16"``."""
        return NAMES[self.dtype]


class TensorOnDisk(_OnDisk):
    """Read one tensor of a file lazily."""

    def __init__(self, file: SafetensorsFile, name: str) -> None:
        entry = file.header[name]
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{file.path}: {name} has the dtype {entry['dtype']}, which hfscale does not read: convert it to one "
                f"of {', '.join(_DTYPES)}"
            )
        self._file: BytesOnDisk = file
        self.shape = tuple(entry["shape"])
        self.dtype = _DTYPES[entry["dtype"]]
        self._begin, end = entry["data_offsets"]
        if end - self._begin != prod(self.shape) * self.dtype.itemsize:
            raise CheckpointError(
                f"{file.path}: {name} of shape {self.shape} and dtype {entry['dtype']} cannot have {end - self._begin} "
                "bytes, so the file is damaged: download or save it again"
            )

    def __getitem__(self, index: Any) -> Tensor:
        whole = tuple((0, size) for size in self.shape)
        return self.read(whole) if index is Ellipsis else self.read(whole)[index]

    def viewed(self, shape: Sequence[int]) -> "TensorOnDisk":
        """Return a lazy tensor that reads the same bytes in another ``shape``."""
        view = copy(self)
        view.shape = tuple(shape)
        return view

    def empty(self, spans: Box) -> Tensor:
        """Return a new tensor for the values of the box ``spans``."""
        return torch.empty([stop - start for start, stop in spans], dtype=self.dtype)

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``, one ``(start, stop)`` per dim; only the rows that the box touches are
        read.
        """
        out = self.empty(spans)
        if out.numel() == 0:
            return out
        (first, last), *rest = spans or ((0, 1),)  # a scalar is a single row
        if len(rest) > 1 and rest[0] != (0, self.shape[1]):
            start, stop = rest[0]
            flat = self.viewed((self.shape[0] * self.shape[1], *self.shape[2:]))
            for place, matrix in enumerate(range(first, last)):
                offset = matrix * self.shape[1]
                out[place] = flat.read(((offset + start, offset + stop), *rest[1:]))
            return out
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        if rest == [(0, size) for size in self.shape[1:]]:
            self._file.read(self._begin + first * row_bytes, out)
            return out
        step = max(1, _BLOCK_BYTES // row_bytes)
        block = torch.empty(
            (min(step, last - first), *self.shape[1:]),
            dtype=self.dtype,
        )
        for row in range(first, last, step):
            rows = min(step, last - row)
            self._file.read(self._begin + row * row_bytes, block[:rows])
            out[row - first : row - first + rows] = block[box_slices(((0, rows), *rest))]
        return out


def box_slices(spans: Box, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Return slices that select the box ``spans`` from a tensor whose first element has the index ``origin`` (default:
    all zeros).
    """
    starts = (0,) * len(spans) if origin is None else origin
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), first in zip(spans, starts, strict=True)
    )


def is_elsewhere(plan: Plan, rank: int, name: str) -> bool:
    """Return whether the parameter, buffer or module ``name`` is on other pipeline ranks only, not on ``rank``."""
    return (
        plan.stages is not None
        and not plan.is_local(rank, name)
        and any(s.is_local(name) for s in plan.stages.stages)
    )


class PartOnDisk(_OnDisk):
    """Read parts of a stored tensor: ``spans`` lists, for each dim, the intervals of indices that are selected and
    concatenated.
    """

    def __init__(self, source: TensorOnDisk, spans: Sequence[Spans]) -> None:
        self.source = source
        self.dtype = source.dtype
        self.spans = spans
        self.shape = tuple(sum(stop - start for start, stop in dim) for dim in spans)

    def __getitem__(self, index: Any) -> Tensor:
        pieces = list(product(*self.spans))
        if len(pieces) == 1:
            part = self.source.read(pieces[0])
        else:
            part = torch.empty(self.shape, dtype=self.dtype)
            ends = [list(accumulate(stop - start for start, stop in dim)) for dim in self.spans]
            places = [[slice(*span) for span in pairwise((0, *each))] for each in ends]
            for box, place in zip(pieces, product(*places), strict=True):
                part[place] = self.source.read(box)
        return part if index is Ellipsis else part[index]


class ShareOnDisk(PartOnDisk):
    """Read the shard of a stored tensor that belongs to the rank at the coordinates ``ranks``, if the tensor's dims are
    sharded as ``cuts`` describe.
    """

    def __init__(
        self,
        source: TensorOnDisk,
        cuts: tuple[Cut, ...],
        ranks: dict[str, int],
    ) -> None:
        super().__init__(
            source,
            [spans or [(0, 0)] for spans in share_spans(source.shape, cuts, ranks)],
        )


class ResizedOnDisk(TensorOnDisk):
    """Read the lazy tensor ``source`` as if it had ``rows`` rows: its last rows are dropped, or copies of the mean of
    its rows are appended.

    A new token of an embedding then has the mean of all tokens' rows, so that its logit is their mean logit (Hewitt,
    "Initializing new word embeddings for pretrained language models", 2021).
    """

    def __init__(self, source: TensorOnDisk, rows: int) -> None:
        self._source = source
        self.dtype = source.dtype
        self.shape = (rows, *source.shape[1:])

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans`` of the resized tensor, one ``(start, stop)`` per dim."""
        (start, stop), *rest = spans
        stored = self._source.shape[0]
        out = self.empty(spans)
        known = max(min(stop, stored) - start, 0)
        if known:
            out[:known] = self._source.read(((start, start + known), *rest))
        if known < stop - start:
            out[known:] = self._mean(rest).to(self.dtype)
        return out

    def _mean(self, rest: list[tuple[int, int]]) -> Tensor:
        sizes = [high - low for low, high in rest]
        total = torch.zeros(sizes, dtype=torch.float64)
        stored = self._source.shape[0]
        block = max(_SUM_BYTES // max(prod(sizes) * total.itemsize, 1), 1)
        for start in range(0, stored, block):
            total += self._source.read(
                (
                    (
                        start,
                        min(start + block, stored),
                    ),
                    *rest,
                )
            ).sum(0, dtype=torch.float64)
        return total / stored
