"""Hostile files are refused in one line, before memory is taken."""

import json
import os
import resource
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

import hfscale
from hfscale import CheckpointError, ConfigError
from hfscale.checkpoint.state_format import INDEX, StateIndex
from hfscale.distributed.files.reader import SafetensorsFile, named_files

from ...tiny_models import tiny

F = '"dtype":"F32"'
HEADERS = {
    "beyond the file": (b'{"a":{%s,"shape":[4],"data_offsets":[0,16]}}', 8),
    "overlapping": (
        b'{"a":{%s,"shape":[2],"data_offsets":[0,8]},"b":{%s,"shape":[2],"data_offsets":[4,12]}}',
        12,
    ),
    "a gap": (
        b'{"a":{%s,"shape":[1],"data_offsets":[0,4]},"b":{%s,"shape":[1],"data_offsets":[8,12]}}',
        12,
    ),
    "twice": (
        b'{"a":{%s,"shape":[1],"data_offsets":[0,4]},"a":{%s,"shape":[1],"data_offsets":[0,4]}}',
        4,
    ),
    "negative shape": (b'{"a":{%s,"shape":[-1,-1],"data_offsets":[0,4]}}', 4),
    "huge shape": (b'{"a":{%s,"shape":[1000000000000],"data_offsets":[0,4]}}', 4),
    "huge empty shape": (b'{"a":{%s,"shape":[0,99999999999999999999999],"data_offsets":[0,0]}}', 0),
    "negative offsets": (b'{"a":{%s,"shape":[1],"data_offsets":[-4,0]}}', 0),
    "offsets that are no integers": (b'{"a":{%s,"shape":[1],"data_offsets":[0.0,4.0]}}', 4),
    "nested": (b'{"a":' * 100_000, 0),
    "no object": (b"[1,2]", 0),
}


def written(path: Path, header: bytes, data: int, length: int | None = None) -> Path:
    header = header.replace(b"%s", F.encode())
    path.write_bytes(
        struct.pack("<Q", len(header) if length is None else length) + header + bytes(data)
    )
    return path


def refused(path: Path) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as caught:
        [each[...] for each in SafetensorsFile(path).slices().values()]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", HEADERS)
def test_headers(tmp_path: Path, kind: str) -> None:
    refused(written(tmp_path / "m.safetensors", *HEADERS[kind]))


def test_an_entry_without_a_shape(tmp_path: Path) -> None:
    header = b'{"a":{%s,"data_offsets":[0,4]}}'
    assert "no dtype or no shape" in refused(written(tmp_path / "m.safetensors", header, 4))


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 62, (1 << 64) - 1])
def test_lengths_of_headers(tmp_path: Path, length: int) -> None:
    refused(written(tmp_path / "m.safetensors", b"{}", 8, length))


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "m.safetensors", b"", 0, 4 << 30)
    os.truncate(path, (4 << 30) + 8)  # a file with a hole
    assert "a header of 4294967296 bytes" in refused(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    assert "no regular file" in refused(tmp_path / "m.safetensors")


def index_of(directory: Path, *names: Any) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "model.safetensors.index.json"
    path.write_text(
        json.dumps({"weight_map": {str(number): name for number, name in enumerate(names)}})
    )
    return path


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "", 7, None, ["x"]]
)
def test_names_that_leave_the_directory(tmp_path: Path, name: Any) -> None:
    with pytest.raises(CheckpointError, match="index"):
        named_files(index_of(tmp_path / "checkpoint", name))


def test_links_that_leave_the_directory(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    index = index_of(tmp_path / "checkpoint", "m.safetensors")
    (tmp_path / "checkpoint" / "m.safetensors").symlink_to("../secret.safetensors")
    with pytest.raises(CheckpointError, match="a link to a file elsewhere"):
        named_files(index)
    # The Hub's cache: the index is a link to the same place.
    index.rename(tmp_path / "index")
    index.symlink_to("../index")
    assert [path.name for path in named_files(index)] == ["m.safetensors"]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"hidden_size": 10**9},
        {"vision_config": {"num_hidden_layers": 10**9}},
        {"num_local_experts": 10**9},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_configs_without_end(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = {**LlamaConfig().to_dict(), "architectures": ["LlamaForCausalLM"], **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for load in (hfscale.plan, hfscale.from_pretrained):
        with pytest.raises(ConfigError, match=r"use at most [\d,]+$"):
            load(str(tmp_path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = hfscale.from_config(tiny("llama", num_hidden_layers=1))
    directory = tmp_path_factory.mktemp("states") / "one"
    hfscale.save_state(model, directory)
    return model, directory


@pytest.mark.parametrize(
    "change", [{"shape": [10**9, 10**9]}, {"cuts": [["tp", 0, 10**12, [], []]]}], ids=str
)
def test_a_state_of_more_than_its_files_hold(
    state: tuple[Any, Path], tmp_path: Path, change: Any
) -> None:
    shutil.copytree(state[1], tmp_path / "state")
    told = json.loads((tmp_path / "state" / INDEX).read_text())
    next(iter(told["tensors"].values())).update(change)
    (tmp_path / "state" / INDEX).write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="entries in"):
        StateIndex.read(tmp_path / "state")


def test_a_state_that_unpacks_to_more(state: tuple[Any, Path]) -> None:
    model, directory = state
    path = directory / "rank-00000.pt"
    size = path.stat().st_size
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("archive/data.pkl", bytes(size * 50))
    with zipfile.ZipFile(path, "a") as packed:
        packed.comment = bytes(size - path.stat().st_size)
    assert path.stat().st_size == size
    with pytest.raises(CheckpointError, match="would unpack to more bytes"):
        hfscale.load_state(model, directory, verify=False)
