"""What another trainer wrote, damaged or made to do harm, is refused in one line: no memory is taken, no code run."""

import json
import os
import resource
import shutil
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import CheckpointError
from hfscale.cli import main

from ..arrivals import write_zero
from ..tiny_models import tiny


class Calls:
    """What a pickle may hold, and must not be made of one."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("made by a pickle",))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("start")
    config = tiny("llama", tie_word_embeddings=False, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def weights(start: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(start).state_dict())


def write_binary(start: Path, out: Path) -> None:
    out.mkdir()
    torch.save(weights(start), out / "pytorch_model.bin")


def write_dcp(start: Path, out: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(weights(start), checkpoint_id=out, no_dist=True)


def write_slices(start: Path, out: Path) -> None:
    out.mkdir()
    for rank in range(2):
        cut = {name: tensor.chunk(2)[rank].clone() for name, tensor in weights(start).items()}
        begins = {
            name: {"saved_offsets": [rank * len(tensor.chunk(2)[0]), *[0] * (tensor.ndim - 1)]}
            for name, tensor in weights(start).items()
        }
        save_file(cut, _slice(out, rank), {"DCP_SHARDING_INFO": json.dumps(begins)})


def _slice(out: Path, rank: int) -> Path:
    return out / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


WRITERS = {
    "binary": write_binary,
    "dcp": write_dcp,
    "slices": write_slices,
    "zero": partial(write_zero, stage=2, gradient=1.0),
}


def shorten(name: str) -> Callable[[Path], None]:
    def harm(out: Path) -> None:
        path = next(out.rglob(name))
        os.truncate(path, path.stat().st_size // 2)

    return harm


def lose(name: str) -> Callable[[Path], None]:
    return lambda out: next(out.rglob(name)).unlink()


def name_a_function(name: str) -> Callable[[Path], None]:
    return lambda out: torch.save({"w": Calls()}, next(out.rglob(name)))


def repack(
    name: str, change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED
) -> Callable[[Path], None]:
    """Write the archive of ``torch.save`` again, with other contents of its entries."""

    def harm(out: Path) -> None:
        path = next(out.rglob(name))
        with zipfile.ZipFile(path) as archive:
            entries = {each: archive.read(each) for each in archive.namelist()}
        with zipfile.ZipFile(path, "w", kind) as archive:
            for each, content in entries.items():
                archive.writestr(each, change(each, content))

    return harm


def shorter(name: str, content: bytes) -> bytes:
    return content[:16] if name.endswith("/data/1") else content


def same(name: str, content: bytes) -> bytes:
    return content


def stored(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change what a file of ``torch.save`` holds."""

    def harm(out: Path) -> None:
        path = next(out.rglob(name))
        found = torch.load(path, weights_only=False)
        change(found)
        torch.save(found, path)

    return harm


def begins(value: list[int]) -> Callable[[Path], None]:
    def harm(out: Path) -> None:
        tensors = {"lm_head.weight": torch.zeros(34, 32)}
        told = {"DCP_SHARDING_INFO": json.dumps({"lm_head.weight": {"saved_offsets": value}})}
        save_file(tensors, _slice(out, 1), told)

    return harm


def latest_elsewhere(out: Path) -> None:
    (out / "latest").write_text("../elsewhere")


HARMS: dict[tuple[str, str], Callable[[Path], None]] = {
    ("binary", "cut"): shorten("*.bin"),
    ("binary", "a function"): name_a_function("*.bin"),
    ("binary", "compressed"): repack("*.bin", same, zipfile.ZIP_DEFLATED),
    ("binary", "a short entry"): repack("*.bin", shorter),
    ("dcp", "cut"): shorten("*.distcp"),
    ("dcp", "no file"): lose("*.distcp"),
    ("slices", "cut"): shorten("shard-00002*"),
    ("slices", "no file"): lose("shard-00002*"),
    ("slices", "begins below 0"): begins([-1, 0]),
    ("slices", "begins far away"): begins([1 << 60, 0]),
    ("slices", "begins in another"): begins([0, 0]),
    ("slices", "begins in one dim"): begins([0]),
    ("zero", "cut"): shorten("*_optim_states.pt"),
    ("zero", "no file"): lose("*rank_1*_optim_states.pt"),
    ("zero", "a function"): name_a_function("*rank_0*_optim_states.pt"),
    ("zero", "a short entry"): repack("*rank_0*_optim_states.pt", shorter),
    ("zero", "another directory"): latest_elsewhere,
    ("zero", "larger weights"): stored(
        "*model_states.pt",
        lambda found: found["param_shapes"][0].update({"lm_head.weight": torch.Size([1 << 40, 9])}),
    ),
    ("zero", "no shapes"): stored("*model_states.pt", lambda found: found.pop("param_shapes")),
    ("zero", "shapes that are none"): stored(
        "*model_states.pt", lambda found: found.update({"param_shapes": 3})
    ),
}


UNTOLD = {("slices", "no file"), ("slices", "begins in another")}
"""Where the files that are left could be all: their model alone knows otherwise."""


@pytest.fixture(scope="module")
def written(start: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("written")
    for name, write in WRITERS.items():
        write(start, directory / name)
    return {name: directory / name for name in WRITERS}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_whole_is_read(kind: str, start: Path, written: dict[str, Path]) -> None:
    model = hfscale.from_pretrained(written[kind], config=str(start))
    expected = weights(start)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("kind", "what"), HARMS)
def test_harm(
    kind: str,
    what: str,
    start: Path,
    written: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Path(shutil.copytree(written[kind], tmp_path / "there"))
    HARMS[kind, what](directory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as caught:
        hfscale.from_pretrained(directory, config=str(start))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert "\n" not in str(caught.value)
    assert not Path("made by a pickle").exists()
    if (kind, what) not in UNTOLD:
        assert main(["inspect", str(directory)]) == 1
        capsys.readouterr()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_file_of_slices_is_noticed_beside_a_config(
    rank: int,
    start: Path,
    written: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is left of the last rank's tensors looks whole, but for the shapes of the model."""
    directory = Path(shutil.copytree(written["slices"], tmp_path / "there"))
    shutil.copyfile(start / "config.json", directory / "config.json")
    assert main(["inspect", str(directory)]) == 0
    _slice(directory, rank).unlink()
    assert main(["inspect", "--quick", str(directory)]) == 1
    assert "copy the files of all ranks" in capsys.readouterr().out
    with pytest.raises(CheckpointError):
        hfscale.from_pretrained(directory)
