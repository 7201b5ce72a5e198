"""Reading parts of safetensors files."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hfscale import CheckpointError
from hfscale.distributed.files import reader
from hfscale.distributed.files.reader import NAMES, SafetensorsFile


def _tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the reads of tensor data."""
    sizes: list[int] = []
    stock = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int, *rest: Any) -> int:
        sizes.append(stock(descriptor, buffers, offset, *rest))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
def test_every_type_reads_like_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {
        "m": _tensor(dtype, 5, 3),
        "s": _tensor(dtype),
        "e": _tensor(dtype, 0, 3),
        "v": _tensor(dtype, 7),
    }
    save_file(stored, tmp_path / "f.safetensors")
    expected = load_file(tmp_path / "f.safetensors")
    slices = SafetensorsFile(tmp_path / "f.safetensors").slices()
    assert slices.keys() == stored.keys()
    with safe_open(tmp_path / "f.safetensors", "pt") as file:
        for name, lazy in slices.items():
            theirs = file.get_slice(name)
            assert (lazy.get_dtype(), lazy.get_shape()) == (
                theirs.get_dtype(),
                list(theirs.get_shape()),
            )
            read = lazy[...]
            assert (read.dtype, read.shape) == (dtype, expected[name].shape)
            assert torch.equal(_bits(read), _bits(expected[name]))
    assert torch.equal(_bits(slices["m"][1:4, :2]), _bits(expected["m"][1:4, :2]))


@given(data=st.data())
@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_box(data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several row blocks.
    monkeypatch.setattr(reader, "_BLOCK_BYTES", data.draw(st.sampled_from([1, 64, 1 << 20])))
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    save_file({"before": torch.ones(3), "t": whole, "z": torch.ones(2)}, tmp_path / "f.safetensors")
    spans = tuple(
        tuple(sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))))
        for size in shape
    )
    read = SafetensorsFile(tmp_path / "f.safetensors").slices()["t"].read(spans)
    assert torch.equal(read, whole[tuple(slice(*span) for span in spans)])
    assert read.is_contiguous()


def test_a_slice_of_rows_reads_only_its_bytes(tmp_path: Path, bytes_read: list[int]) -> None:
    save_file(
        {"t": _tensor(torch.float32, 100, 8), "u": _tensor(torch.float32, 50)},
        tmp_path / "f.safetensors",
    )
    lazy = SafetensorsFile(tmp_path / "f.safetensors").slices()["t"]
    assert bytes_read == []  # opening reads no tensor
    lazy.read(((25, 50), (0, 8)))
    assert bytes_read == [25 * 8 * 4]


def test_a_slice_of_columns_reads_its_rows_in_blocks(
    tmp_path: Path, bytes_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _tensor(torch.float32, 100, 8)
    save_file({"t": whole}, tmp_path / "f.safetensors")
    monkeypatch.setattr(reader, "_BLOCK_BYTES", 30 * 8 * 4)
    read = SafetensorsFile(tmp_path / "f.safetensors").slices()["t"].read(((0, 100), (4, 8)))
    assert torch.equal(read, whole[:, 4:])
    assert bytes_read == [30 * 32, 30 * 32, 30 * 32, 10 * 32]


def test_an_empty_share_reads_nothing(tmp_path: Path, bytes_read: list[int]) -> None:
    save_file({"t": _tensor(torch.float32, 4, 2)}, tmp_path / "f.safetensors")
    assert SafetensorsFile(tmp_path / "f.safetensors").slices()["t"].read(
        ((4, 4), (0, 2))
    ).shape == (0, 2)
    assert bytes_read == []


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _tensor(torch.float32, 9, 3)
    save_file({"t": whole}, tmp_path / "f.safetensors")
    lazy = SafetensorsFile(tmp_path / "f.safetensors").slices()["t"]
    stock = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, offset: stock(file, [buffers[0][:7]], offset)
    )
    assert torch.equal(lazy[...], whole)


def _write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"", b""),
        (b"not json at all", b""),
        (b"\xff\xfe{}", b""),
        ([1, 2], b""),
        ("text", b""),
        (7, b""),
        ({"t": 3}, b""),
        ({"t": {**_ENTRY, "data_offsets": [0]}}, bytes(8)),
        ({"t": {**_ENTRY, "data_offsets": "08"}}, bytes(8)),
        ({"t": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        ({"t": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        ({"t": _ENTRY}, bytes(7)),
        ({"t": _ENTRY}, bytes(9)),
        ({"t": _ENTRY, "u": _ENTRY}, bytes(8)),  # two tensors in one place
        ({"t": {**_ENTRY, "data_offsets": [4, 12]}}, bytes(12)),  # a hole
    ],
    ids=str,
)
def test_damaged_files_are_refused_by_name(header: Any, data: bytes, tmp_path: Path) -> None:
    path = _write(tmp_path / "damaged.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(f"{path} is truncated or not a safetensors file (")
    assert str(caught.value).endswith("download or save it again")


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_refused_by_name(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"t": torch.ones(64)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} is truncated"):
        SafetensorsFile(path)


def test_a_refused_file_closes_only_its_own_descriptor(tmp_path: Path) -> None:
    path = _write(tmp_path / "damaged.safetensors", {"t": _ENTRY}, bytes(7))
    with pytest.raises(CheckpointError):
        SafetensorsFile(path)
    with path.open("rb") as other:  # takes the number that was freed
        try:
            SafetensorsFile(path)
        except CheckpointError as error:
            del error
        assert os.fstat(other.fileno()).st_size == path.stat().st_size


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"t": torch.ones(64)}, path)
    lazy = SafetensorsFile(path).slices()["t"]
    os.truncate(path, path.stat().st_size - 16)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} ended early"):
        _ = lazy[...]


def test_bytes_that_do_not_match_the_shape(tmp_path: Path) -> None:
    path = _write(tmp_path / "f.safetensors", {"t": {**_ENTRY, "shape": [3]}}, bytes(8))
    with pytest.raises(
        CheckpointError,
        match=r"t of shape \(3,\) and dtype F32 cannot have 8 bytes, so the file is damaged",
    ):
        SafetensorsFile(path).slices()


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    path = _write(tmp_path / "f.safetensors", {"t": {**_ENTRY, "dtype": "F4"}}, bytes(8))
    with pytest.raises(
        CheckpointError,
        match="t has the dtype F4, which hfscale does not read: convert it to one of",
    ):
        SafetensorsFile(path).slices()


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        SafetensorsFile(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        SafetensorsFile(tmp_path)
