"""Streaming plain Hugging Face weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hfscale import CheckpointError
from hfscale.distributed.files.reader import NAMES, SafetensorsFile
from hfscale.distributed.files.writer import (
    INDEX,
    STALE,
    WEIGHTS,
    CheckpointWriter,
    bytes_of,
    write_tensors,
)
from hfscale.train.runtime.writing import atomic_directory


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(12.0).view(3, 4),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.ones(0, 4),
        "c": torch.arange(8.0, dtype=torch.float64).view(2, 2, 2),
    }


def _write(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    size: str | int = "5GB",
    reverse: bool = False,
) -> None:
    with atomic_directory(directory, stale=STALE) as staging:
        writer = CheckpointWriter(
            staging.path, {name: tensor.to("meta") for name, tensor in tensors.items()}, size
        )
        for name in reversed(tensors) if reverse else tensors:
            writer.add(name, tensors[name])
        writer.finish()


def _weights(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_file())


@pytest.mark.parametrize("reverse", [False, True])
def test_one_file_reads_with_safetensors(reverse: bool, tmp_path: Path) -> None:
    _write(tmp_path / "new" / "deep", _tensors(), reverse=reverse)
    assert _weights(tmp_path / "new" / "deep") == [WEIGHTS]
    loaded = load_file(tmp_path / "new" / "deep" / WEIGHTS)
    assert loaded.keys() == _tensors().keys()
    for name, tensor in _tensors().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(tmp_path / "new" / "deep" / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt"}  # the host refuses files without it


def test_tensors_lie_as_safetensors_writes_them(tmp_path: Path) -> None:
    """The largest types first, then by name, so that every offset is a multiple of its type."""
    tensors = {
        f"{dtype}".removeprefix("torch."): torch.ones(3, dtype=torch.uint8).to(dtype)
        for dtype in NAMES
    }
    tensors |= {f"a.{name}": tensor[:1].clone() for name, tensor in tensors.items()}
    write_tensors(tmp_path / "one", tensors)
    save_file(tensors, tmp_path / "other")
    _write(tmp_path / "new", tensors)
    places = [
        SafetensorsFile(tmp_path / name).header for name in ("one", "other", f"new/{WEIGHTS}")
    ]
    for found in places:
        found.pop("__metadata__", None)
        for name, entry in found.items():
            assert entry["data_offsets"][0] % tensors[name].itemsize == 0
    assert places[0] == places[1] == places[2]
    loaded = load_file(tmp_path / "one")
    assert all(
        torch.equal(bytes_seen(loaded[name]), bytes_seen(tensor))
        for name, tensor in tensors.items()
    )


def bytes_seen(tensor: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes_of(tensor)), dtype=torch.uint8)


@pytest.mark.parametrize("reverse", [False, True])
def test_shards_and_their_index(reverse: bool, tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((4, 4), float(i)) for i in range(5)}  # 64 bytes each
    _write(tmp_path, tensors, 130, reverse)
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert _weights(tmp_path) == [*names, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 64
    assert index["weight_map"].keys() == tensors.keys()
    loaded = {name: load_file(tmp_path / name) for name in names}
    for name, tensor in tensors.items():
        assert torch.equal(loaded[index["weight_map"][name]][name], tensor)
    assert [len(shard) for shard in loaded.values()] == [2, 2, 1]


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    _write(tmp_path, {"small": torch.ones(2), "large": torch.ones(100), "other": torch.ones(2)}, 64)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert index["large"] != index["small"]
    assert load_file(tmp_path / index["large"]).keys() == {"large"}


@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
def test_every_type(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(6).to(dtype)
    _write(tmp_path, {"t": tensor})
    loaded = load_file(tmp_path / WEIGHTS)["t"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    _write(tmp_path, {"t": whole.T[1:3]})
    assert torch.equal(load_file(tmp_path / WEIGHTS)["t"], whole.T[1:3])


def test_earlier_weights_are_replaced_whatever_their_shape(tmp_path: Path) -> None:
    _write(tmp_path, _tensors(), 40)
    for name in (
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
    ):
        (tmp_path / name).write_text("old")
    kept = ["adapter_model.safetensors", "config.json", "model_card.safetensors", "tokenizer.json"]
    for name in kept:
        (tmp_path / name).write_text("the user's")
    _write(tmp_path, {"t": torch.ones(2)})
    assert _weights(tmp_path) == sorted([WEIGHTS, *kept])
    _write(tmp_path, {"t": torch.ones(20), "u": torch.ones(20)}, 80)
    assert WEIGHTS not in _weights(tmp_path)  # it would be preferred to the shards
    assert INDEX in _weights(tmp_path)


def test_nothing_moves_before_the_end(tmp_path: Path) -> None:
    _write(tmp_path, {"t": torch.zeros(2)})
    with atomic_directory(tmp_path, stale=STALE) as staging:
        writer = CheckpointWriter(staging.path, {"t": torch.ones(2, device="meta")}, "5GB")
        writer.add("t", torch.ones(2))
        writer.finish()
        assert load_file(tmp_path / WEIGHTS)["t"].tolist() == [0, 0]
    assert load_file(tmp_path / WEIGHTS)["t"].tolist() == [1, 1]


def test_what_a_killed_save_left_does_not_become_part_of_the_next(tmp_path: Path) -> None:
    (tmp_path / ".incomplete").mkdir()
    (tmp_path / ".incomplete" / WEIGHTS).write_text(
        "half a model, which would be preferred to the shards"
    )
    _write(tmp_path, {"t": torch.ones(20), "u": torch.ones(20)}, 80)
    assert WEIGHTS not in _weights(tmp_path)


def test_a_tensor_that_never_came_is_not_zeros(tmp_path: Path) -> None:
    _write(tmp_path, {"t": torch.ones(2)})
    with atomic_directory(tmp_path, stale=STALE) as staging:
        writer = CheckpointWriter(
            staging.path, {name: torch.empty(2, device="meta") for name in "tuv"}, "5GB"
        )
        writer.add("u", torch.ones(2))
        with pytest.raises(CheckpointError, match="these tensors were not written: t, v"):
            writer.finish()
        assert load_file(tmp_path / WEIGHTS).keys() == {"t"}
        writer.add("t", torch.ones(2))
        writer.add("v", torch.ones(2))
        writer.finish()


def test_a_tensor_that_is_not_the_announced_one_is_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, {"t": torch.empty(2, device="meta")}, "5GB")
    with pytest.raises(
        CheckpointError, match=r"t must be added as \(2,\) of torch.float32, .* got \(3,\)"
    ):
        writer.add("t", torch.ones(3))  # it would overwrite its neighbour
    with pytest.raises(CheckpointError, match=r"got \(2,\) of torch.int32"):
        writer.add("t", torch.ones(2, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="u was written already, or is not among"):
        writer.add("u", torch.ones(2))
    writer.add("t", torch.ones(2))
    with pytest.raises(CheckpointError, match="t was written already"):
        writer.add("t", torch.ones(2))
    writer.finish()


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"max_shard_size='64 bytes' is not a size: use a number of bytes, or .*'5GB'",
    ):
        CheckpointWriter(tmp_path, {"t": torch.empty(2, device="meta")}, "64 bytes")


def test_a_type_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"t has the dtype torch.complex128, which safetensors files cannot hold",
    ):
        CheckpointWriter(
            tmp_path, {"t": torch.empty(2, dtype=torch.complex128, device="meta")}, "5GB"
        )
