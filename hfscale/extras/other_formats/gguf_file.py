"""Read GGUF files, as llama.cpp writes them: a box of a tensor is read by the blocks that it touches.

::

    b"GGUF"  version  number of tensors  number of fields
    fields   name, type, value                             of the model and its tokenizer: stock code reads them
    tensors  name, sizes, the last dim first, type, place
    data     at places that are multiples of general.alignment

Values are those of the package gguf, in float32, as transformers loads them.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from math import ceil, prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ...distributed.files.dequantized import Along, DequantizedOnDisk, StoredPart
from ...distributed.files.reader import BytesOnDisk, TensorOnDisk
from ...errors import CheckpointError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Types of values, by llama.cpp's numbers.
_SIZES = {
    **dict.fromkeys((0, 1, 7), 1),
    **dict.fromkeys((2, 3), 2),
    **dict.fromkeys((4, 5, 6), 4),
    **dict.fromkeys((10, 11, 12), 8),
}
_TEXT = 8
_ARRAY = 9
_ARCHITECTURE = "general.architecture"
_SCALING = ".rope.scaling.type"
_ALIGNMENT = "general.alignment"
_PARTS = "split.count"
_FORMATS = {_ALIGNMENT: "<I", _PARTS: "<H"}
# What a file may ask for; those that there are stay far below.
_MOST_DIMS = 4
_MOST_FIELDS = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_TEXTS = 1 << 24
_LONGEST_NAME = 1 << 16
_LARGEST = 1 << 48


@dataclass(frozen=True)
class _Entry:
    """Describe one tensor of a file."""

    shape: tuple[int, ...]
    kind: Any  # the package's GGMLQuantizationType
    begin: int  # of its bytes in the data
    size: int  # in bytes


@dataclass(frozen=True)
class _Header:
    """Hold what a file says of its tensors."""

    architecture: str
    scaling: str  # of rotary embeddings
    entries: Mapping[str, _Entry]
    start: int  # of the data


class GgufFile(BytesOnDisk):
    """Read tensors of a GGUF file on demand; raise :class:`CheckpointError` if it is not a complete one."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._gguf = the_package(path)
        try:
            self._open()
            found = self.path.stat()
            self._header = _read_header(self.path, found.st_size, found.st_mtime_ns)
            self._start = self._header.start
        except (OSError, ValueError, LookupError, struct.error) as error:
            raise CheckpointError(
                f"{self.path} is truncated or not a GGUF file that can be read ({error}): download it, or convert the "
                "model by llama.cpp again"
            ) from error

    def slices(self) -> dict[str, TensorOnDisk]:
        """Return a lazy tensor for every tensor of the file, by its own names, most of them of float32."""
        return {name: self._slice(name, entry) for name, entry in self._header.entries.items()}

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the architecture."""
        return self._header.architecture

    @property
    def scaling(self) -> str:
        """Return how rotary embeddings are scaled, ``none`` if they are not."""
        return self._header.scaling

    def describe(self) -> str:
        """Return its architecture and the types of its tensors, in words."""
        kinds = sorted({each.kind.name for each in self._header.entries.values()})
        return f"{self.architecture} in {', '.join(kinds)}"

    def _slice(self, name: str, entry: _Entry) -> TensorOnDisk:
        plain = _PLAIN.get(entry.kind.name)
        if plain is not None:
            return _TensorAt(self, entry.begin, entry.shape, plain)
        if len(entry.shape) == 1:
            raise CheckpointError(
                f"{self.path}: {name} is a vector in {entry.kind.name}, which is read of matrices alone: write it in "
                "F32, as llama.cpp does"
            )
        entries, size = self._gguf.GGML_QUANT_SIZES[entry.kind]
        shape = (*entry.shape[:-1], entry.shape[-1] // entries * size)
        words = _TensorAt(self, entry.begin, shape, torch.uint8)
        unpack = partial(_values, kind=entry.kind, package=self._gguf)
        parts = {"values": StoredPart(words, columns=Along(entries, size, unpack))}
        weight = DequantizedOnDisk(entry.shape, parts, _as_they_are)
        weight.dtype = torch.float32
        return weight


class _TensorAt(TensorOnDisk):
    """One tensor of a file, by its place."""

    def __init__(
        self, file: BytesOnDisk, begin: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._file = file
        self._begin = begin
        self.shape = shape
        self.dtype = dtype


class _Cursor:
    """Read a header from its beginning on; raise ValueError where the file ends first."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self.size = size
        self.at = 0

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        self._go_on(length)
        return self._file.read(length)

    def skip(self, length: int) -> None:
        """Pass over bytes."""
        self._go_on(length)
        self._file.seek(length, 1)

    def number(self, form: str) -> Any:
        """Return the next number, in a format of ``struct``."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, most: int, what: str) -> int:
        """Return the next number, of things of which there are at least as many bytes."""
        found = int(self.number("<Q"))
        if found > min(most, self.size - self.at):
            raise ValueError(f"{found} {what}")
        return found

    def text(self) -> str:
        """Return the next string, which is a name."""
        return self.take(self.count(_LONGEST_NAME, "bytes of a name")).decode()

    def _go_on(self, length: int) -> None:
        if length > self.size - self.at:
            raise ValueError(f"{length} bytes from byte {self.at} on, in a file of {self.size}")
        self.at += length


@lru_cache(maxsize=4)
def _read_header(path: Path, size: int, changed: int) -> _Header:
    """Return the header of a file as it was ``changed`` last; a load asks several times, and tokenizers are long."""
    with path.open("rb") as file:
        cursor = _Cursor(file, size)
        if cursor.take(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = cursor.number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of the format, not {_VERSIONS}")
        tensors = cursor.count(_MOST_TENSORS, "tensors")
        fields = _fields(cursor, cursor.count(_MOST_FIELDS, "fields"))
        architecture = fields[_ARCHITECTURE]
        if (parts := fields.get(_PARTS, 1)) > 1:
            raise ValueError(f"it is one of {parts} parts: join them by llama-gguf-split --merge")
        # ``none`` of some, which is as if it were not there
        scaling = next((v for k, v in fields.items() if k.endswith(_SCALING)), "none")
        alignment = fields.get(_ALIGNMENT, 32)
        if not 0 < alignment <= 1 << 20:
            raise ValueError(f"places are multiples of {alignment}")
        entries = _table(cursor, tensors, the_package(path))
        start = ceil(cursor.at / alignment) * alignment
    _check_places(entries, size - start, alignment)
    return _Header(architecture, scaling, entries, start)


def _table(cursor: _Cursor, count: int, package: Any) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for _ in range(count):
        name = cursor.text()
        dims = cursor.number("<I")
        if not 0 < dims <= _MOST_DIMS:
            raise ValueError(f"{name} has {dims} dims")
        shape = tuple(cursor.number("<Q") for _ in range(dims))[::-1]
        kind = package.GGMLQuantizationType(cursor.number("<I"))
        block, size = package.GGML_QUANT_SIZES[kind]
        if name in entries or not 0 < prod(shape) < _LARGEST or shape[-1] % block:
            raise ValueError(f"{name} of shape {list(shape)} in {kind.name}")
        entries[name] = _Entry(shape, kind, cursor.number("<Q"), prod(shape) // block * size)
    return entries


def _fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    """Return the fields that say how the file is laid out, and pass over the others."""
    found: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.text()
        kind = cursor.number("<I")
        if (name == _ARCHITECTURE or name.endswith(_SCALING)) and kind == _TEXT:
            found[name] = cursor.text()
        elif name in _FORMATS and _SIZES.get(kind) == struct.calcsize(_FORMATS[name]):
            found[name] = cursor.number(_FORMATS[name])
        else:
            _pass_over(cursor, kind)
    return found


def _pass_over(cursor: _Cursor, kind: int) -> None:
    if kind == _TEXT:
        cursor.skip(cursor.count(_LARGEST, "bytes of a string"))
    elif kind == _ARRAY:
        inner = cursor.number("<I")
        if inner == _TEXT:
            for _ in range(cursor.count(_MOST_TEXTS, "strings")):
                _pass_over(cursor, _TEXT)
        else:
            cursor.skip(_SIZES[inner] * cursor.count(_LARGEST, "numbers"))
    else:
        cursor.skip(_SIZES[kind])


def _check_places(entries: Mapping[str, _Entry], size: int, alignment: int) -> None:
    """Raise ValueError if the bytes of tensors overlap, or are not within ``size`` bytes of data."""
    placed = sorted((each.begin, each.begin + each.size, name) for name, each in entries.items())
    for begin, end, name in placed:
        if begin % alignment or end > size:
            raise ValueError(f"{name} in bytes {begin} to {end} of {size} bytes of data")
    for (_, end, first), (begin, _, second) in pairwise(placed):
        if begin < end:
            raise ValueError(f"{first} and {second} share bytes")


def begins_like_one(path: Path) -> bool:
    """Return whether a file begins as GGUF files do."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def the_package(path: str | Path) -> Any:
    """Return the package gguf; raise :class:`CheckpointError` if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{path} is read by the package gguf, as transformers reads it: pip install 'hfscale[gguf]'"
        ) from error
    return gguf


def _values(words: Tensor, kind: Any, package: Any) -> Tensor:
    """Return the values of whole blocks: of ``[..., n * bytes]`` ``[..., n * entries]``, in float32."""
    return torch.from_numpy(package.dequantize(words.contiguous().numpy(), kind))


def _as_they_are(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return parts["values"].to(dtype)
