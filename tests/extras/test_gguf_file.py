"""GGUF files: values of the package gguf by slices; damaged and hostile ones are refused before memory is taken."""

import os
import resource
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

import hfscale
from hfscale import CheckpointError
from hfscale.cli import main
from hfscale.extras.other_formats.gguf_file import GgufFile

from ..arrivals import bytes_read
from ..gguf_files import blocks

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_slices_are_those_of_the_package(kind: Kind, tmp_path: Path) -> None:
    shape = (2, 6, 512)
    values = torch.randn(shape).numpy()
    words = blocks(shape, kind) if kind in (Kind.Q4_K, Kind.Q6_K) else gguf.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", words, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = torch.from_numpy(gguf.dequantize(words, kind).reshape(shape))
    weight = GgufFile(tmp_path / "m.gguf").slices()["w"]
    assert weight.shape == shape
    assert torch.equal(weight[...].float(), whole)
    with bytes_read() as sizes:
        found = weight.read(((1, 2), (2, 5), (37, 301)))
    assert torch.equal(found.float(), whole[1:2, 2:5, 37:301])
    assert sum(sizes) <= words.nbytes // 4  # of twelve rows, three


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def tensor(name: str = "w", dims: Any = (4, 2), kind: int = 0, begin: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, begin)


def built(
    *tensors: bytes,
    fields: tuple[bytes, ...] = (ARCHITECTURE,),
    start: tuple[int, int | None, int | None] = (3, None, None),
    data: int = 64,
) -> bytes:
    version, count, of_fields = start
    told = struct.pack(
        "<IQQ",
        version,
        len(tensors) if count is None else count,
        len(fields) if of_fields is None else of_fields,
    )
    header = b"GGUF" + told + b"".join(fields) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


def number(name: str, kind: int, form: str, value: int) -> bytes:
    return text(name) + struct.pack(f"<I{form}", kind, value)


def texts(count: int) -> bytes:
    return text("tokens") + struct.pack("<IIQ", 9, 8, count)


HOSTILE = {
    "another magic": b"GGML" + built(tensor())[4:],
    "empty": b"",
    "version 1": built(tensor(), start=(1, None, None)),
    "cut in its header": built(tensor())[:60],
    "cut in its data": built(tensor(), data=16),
    "tensors without end": built(tensor(), start=(3, 1 << 60, None)),
    "fields without end": built(tensor(), start=(3, None, 1 << 60)),
    "more tensors than there are": built(tensor(), start=(3, 2, None)),
    "a name without end": built(struct.pack("<Q", 1 << 40)),
    "a name that is no text": built(tensor().replace(b"w", b"\xff")),
    "beyond the file": built(tensor(begin=64)),
    "shared bytes": built(tensor(), tensor("v")),
    "between places": built(tensor(begin=8)),
    "one name twice": built(tensor(), tensor(begin=32)),
    "sizes without end": built(tensor(dims=(1 << 62, 1 << 62))),
    "no size": built(tensor(dims=(0, 4))),
    "many dims": built(tensor(dims=(1,) * 9)),
    "an unknown type": built(tensor(kind=250)),
    "half a block": built(tensor(kind=2, dims=(33, 1))),
    "no alignment": built(tensor(), fields=(ARCHITECTURE, number("general.alignment", 4, "I", 0))),
    "no architecture": built(tensor(), fields=()),
    "a part of several": built(tensor(), fields=(ARCHITECTURE, number("split.count", 2, "H", 3))),
    "strings without end": built(tensor(), fields=(ARCHITECTURE, texts(1 << 40))),
    "a list of lists": built(
        tensor(), fields=(ARCHITECTURE, text("x") + struct.pack("<IIQ", 9, 9, 1))
    ),
    "an unknown value": built(tensor(), fields=(ARCHITECTURE, number("x", 77, "I", 0))),
}


def test_what_others_are_made_of_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(built(tensor(), tensor("v", begin=32)))
    assert GgufFile(path).slices()["v"][...].shape == (2, 4)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[kind])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="truncated or not a GGUF file") as caught:
        GgufFile(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="truncated or not a GGUF file"):
        hfscale.from_pretrained(path)
    assert main(["inspect", str(path)]) == 1
    assert "not a GGUF file" in capsys.readouterr().out


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="no regular file"):
        GgufFile(tmp_path / "m.gguf")
