"""Read GGUF files of llama.cpp: of a box (a slice in every dim) of a tensor, only the quantization blocks that overlap
the box are read.

::

    b"GGUF"  version  number of tensors  number of fields
    fields   name, type, value                             describe model and tokenizer: transformers reads them
    tensors  name, sizes (the last dim first), type, place
    data     at offsets that are multiples of general.alignment

Values are dequantized by the package gguf, to float32, as in transformers.
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
# Type of a field's value (llama.cpp's number) -> bytes.
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
# Upper limits for numbers in a file; existing files stay far below.
_MOST_DIMS = 4
_MOST_FIELDS = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_TEXTS = 1 << 24
_LONGEST_NAME = 1 << 16
_LARGEST = 1 << 48


@dataclass(frozen=True)
class _Entry:
    """Describe one tensor of a GGUF file: its shape, its quantization, and the position of its bytes."""

    shape: tuple[int, ...]
    kind: Any  # the package's GGMLQuantizationType
    begin: int  # first byte, from the start of the data
    size: int  # number of bytes


@dataclass(frozen=True)
class _Header:
    """Hold a GGUF file's header: the architecture, and a description of each tensor."""

    architecture: str
    scaling: str  # kind of scaling of rotary embeddings
    entries: Mapping[str, _Entry]
    start: int  # first byte of the data in the file


class GgufFile(BytesOnDisk):
    """Read tensors of a GGUF file on demand; raise :class:`CheckpointError` if the file is incomplete or invalid."""

    def __init__(self, path: str | Path) -> None:
        self._gguf = the_package(path)
        try:
            super().__init__(path)
            found = self.path.stat()
            self._header = _read_header(self.path, found.st_size, found.st_mtime_ns)
            self._start = self._header.start
        except (OSError, ValueError, LookupError, struct.error) as error:
            raise CheckpointError(
                f"{self.path} is truncated or not a GGUF file that can be read ({error}): download it, or convert the "
                "model by llama.cpp again"
            ) from error

    def slices(self) -> dict[str, TensorOnDisk]:
        """Return a lazy tensor, mostly in float32, for every tensor of the file, by the names in the file."""
        return {name: self._slice(name, entry) for name, entry in self._header.entries.items()}

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the model's architecture."""
        return self._header.architecture

    @property
    def scaling(self) -> str:
        """Return the kind of scaling of rotary embeddings; ``none`` if they are not scaled."""
        return self._header.scaling

    def describe(self) -> str:
        """Return a phrase with the architecture and the quantization types of the tensors."""
        kinds = sorted({each.kind.name for each in self._header.entries.values()})
        return f"{self.architecture} in {', '.join(kinds)}"

    def _slice(self, name: str, entry: _Entry) -> TensorOnDisk:
        plain = _PLAIN.get(entry.kind.name)
        if plain is not None:
            return _TensorAt(self, entry.begin, entry.shape, plain)
        if len(entry.shape) == 1:
            raise CheckpointError(
                f"{self.path}: {name} is a vector in {entry.kind.name}, but only matrices can be read in that type: "
                "write it in F32, as llama.cpp does"
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
    """Read one unquantized tensor of a file at its offset."""

    def __init__(
        self, file: BytesOnDisk, begin: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._file = file
        self._begin = begin
        self.shape = shape
        self.dtype = dtype


class _Cursor:
    """Read the header of a file from its first byte on; raise ValueError if the file ends within the header."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self.size = size
        self.at = 0

    def take(self, length: int) -> bytes:
        """Return the next ``length`` bytes."""
        self._go_on(length)
        return self._file.read(length)

    def skip(self, length: int) -> None:
        """Skip the next ``length`` bytes."""
        self._go_on(length)
        self._file.seek(length, 1)

    def number(self, form: str) -> Any:
        """Return the next number, whose type is ``form``, a format string of the module ``struct``."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, most: int, what: str) -> int:
        """Return the next number, a count of items of at least one byte each; raise ValueError if the file cannot hold
        so many.
        """
        found = int(self.number("<Q"))
        if found > min(most, self.size - self.at):
            raise ValueError(f"its header lists {found} {what}, more than the file can hold")
        return found

    def text(self) -> str:
        """Return the next string, such as a tensor's name: its length comes first, then its bytes."""
        return self.take(self.count(_LONGEST_NAME, "bytes of a name")).decode()

    def _go_on(self, length: int) -> None:
        if length > self.size - self.at:
            raise ValueError(
                f"{length} bytes are expected from byte {self.at} on, but the file has only {self.size} bytes"
            )
        self.at += length


@lru_cache(maxsize=4)
def _read_header(path: Path, size: int, changed: int) -> _Header:
    """Return the header of a file; it is cached until ``changed``, the time of the file's last change, differs: a load
    reads the header several times, and the tokenizer in it is long.
    """
    with path.open("rb") as file:
        cursor = _Cursor(file, size)
        if cursor.take(len(_MAGIC)) != _MAGIC:
            raise ValueError("the file does not begin with GGUF")
        version = cursor.number("<I")
        if version not in _VERSIONS:
            raise ValueError(
                f"the file has version {version} of the format, but hfscale reads only the versions {_VERSIONS}"
            )
        tensors = cursor.count(_MOST_TENSORS, "tensors")
        fields = _fields(cursor, cursor.count(_MOST_FIELDS, "fields"))
        architecture = fields[_ARCHITECTURE]
        if (parts := fields.get(_PARTS, 1)) > 1:
            raise ValueError(
                f"the file is one of {parts} parts of a model: join the parts by llama-gguf-split --merge"
            )
        # some files have ``none``, which means the same as no entry
        scaling = next((v for k, v in fields.items() if k.endswith(_SCALING)), "none")
        alignment = fields.get(_ALIGNMENT, 32)
        if not 0 < alignment <= 1 << 20:
            raise ValueError(
                f"the file aligns its data to {alignment} bytes, which is not between 1 and 2^20"
            )
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
            raise ValueError(f"the tensor {name} has {dims} dims, too few or too many")
        shape = tuple(cursor.number("<Q") for _ in range(dims))[::-1]
        kind = package.GGMLQuantizationType(cursor.number("<I"))
        block, size = package.GGML_QUANT_SIZES[kind]
        if name in entries or not 0 < prod(shape) < _LARGEST or shape[-1] % block:
            raise ValueError(
                f"the tensor {name} cannot have the shape {list(shape)} in the type {kind.name}, or is listed twice"
            )
        entries[name] = _Entry(shape, kind, cursor.number("<Q"), prod(shape) // block * size)
    return entries


def _fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    """Return the fields that are needed to read the tensors (alignment, architecture, rotary scaling); skip all other
    fields.
    """
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
    """Raise ValueError if the bytes of two tensors overlap, or lie outside the ``size`` bytes of data."""
    placed = sorted((each.begin, each.begin + each.size, name) for name, each in entries.items())
    for begin, end, name in placed:
        if end > size:
            raise ValueError(
                f"the bytes {begin} to {end} of {name} are not inside the {size} bytes of data"
            )
        if begin % alignment:
            raise ValueError(
                f"the bytes of {name} begin at {begin}, which is no multiple of the file's alignment, {alignment}"
            )
    for (_, end, first), (begin, _, second) in pairwise(placed):
        if begin < end:
            raise ValueError(f"the bytes of the tensors {first} and {second} overlap")


def begins_like_one(path: Path) -> bool:
    """Return whether a file begins with the bytes that identify GGUF files."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def the_package(path: str | Path) -> Any:
    """Return the package ``gguf``; raise :class:`CheckpointError` if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{path} needs the package gguf to be read, also by transformers: pip install 'hfscale[gguf]'"
        ) from error
    return gguf


def _values(words: Tensor, kind: Any, package: Any) -> Tensor:
    """Dequantize full blocks ``[..., n * bytes of a block]`` to float32 values ``[..., n * entries of a block]``."""
    return torch.from_numpy(package.dequantize(words.contiguous().numpy(), kind))


def _as_they_are(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return parts["values"].to(dtype)
