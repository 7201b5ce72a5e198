"""Weights that other trainers wrote over several ranks: the bits of safetensors, in any layout, by slices."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, GPT2Config

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.cli import main
from hfscale.distributed.files.sources import find_source
from hfscale.testing import RankPool

from ..arrivals import KINDS, WRITES_SLICES, bytes_read, write_shards
from ..mixtures import qwen3_moe
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
CONFIGS: dict[str, Any] = {
    "llama": tiny("llama", tie_word_embeddings=False),
    "tied": tiny("llama", tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=32),
    "experts": qwen3_moe(),
}
CASES = [
    pytest.param(kind, name, marks=[] if kind in ("nested", "slices") or name == "llama" else slow)
    for slow in [pytest.mark.slow]
    for kind in KINDS
    for name in CONFIGS
]
CASES += [("torchtitan", "llama"), ("torchtitan", "tied")]
LAYOUTS = [{"tp_size": 2}, {"pp_size": 2}, {"dp_shard_size": 2}]
needs_slices = pytest.mark.skipif(not WRITES_SLICES, reason="this transformers writes none")


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


def loaded(directory: str, layout: dict[str, int], base: str) -> dict[str, Any]:
    config = {} if Path(directory, "config.json").exists() else {"config": base}
    parallel = ParallelConfig(**layout)
    model = hfscale.from_pretrained(directory, parallel=parallel, dtype=torch.float32, **config)
    return dict(hfscale.stream_weights(model))


@needs_slices
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_weights_are_those_that_were_written(
    kind: str, name: str, starts: dict[str, Path], pools: Pools, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    pools(2).run(write_shards, str(starts[name]), out, kind)
    stored = AutoModelForCausalLM.from_pretrained(starts[name], dtype=torch.float32).state_dict()
    for layout in LAYOUTS:
        found = pools(2).run(loaded, out, layout, str(starts[name]))[0]
        assert found.keys() <= stored.keys()
        for key, value in found.items():
            assert torch.equal(value, stored[key]), (layout, key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_slices_are_read_alone(tmp_path: Path) -> None:
    weight = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    dcp.save({"w": weight, "t": weight.t(), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    source = find_source(tmp_path)
    assert source is not None
    tensors = source.open()
    assert tensors.keys() == {"w", "t"}
    with bytes_read() as sizes:
        assert torch.equal(tensors["w"].read(((3, 8), (0, 1024))), weight[3:8])
    assert sum(sizes) < 200_000
    assert torch.equal(tensors["t"].read(((3, 8), (1, 9))), weight.t()[3:8, 1:9])
    assert torch.equal(tensors["w"].viewed((512, 2048))[...], weight.view(512, 2048))


@needs_slices
@pytest.mark.parametrize("kind", ["nested", "accelerate", "slices"])
def test_converted_and_described(
    kind: str,
    starts: dict[str, Path],
    pools: Pools,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "out")
    pools(2).run(write_shards, str(starts["experts"]), out, kind)
    assert main(["inspect", out]) == 0
    assert "hfscale.from_pretrained(" in capsys.readouterr().out
    converted = tmp_path / "converted"
    assert main(["convert", out, str(converted), "--config", str(starts["experts"])]) == 0
    expected = AutoModelForCausalLM.from_pretrained(starts["experts"]).state_dict()
    found = AutoModelForCausalLM.from_pretrained(converted).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.fixture(scope="module")
def shards(starts: dict[str, Path], pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards")
    pools(2).run(write_shards, str(starts["llama"]), str(out), "state dict")
    return out


def lose_a_file(directory: Path) -> None:
    (directory / "__1_0.distcp").unlink()


def shorten(directory: Path) -> None:
    os.truncate(directory / "__0_0.distcp", 4000)


def damage_metadata(directory: Path) -> None:
    os.truncate(directory / ".metadata", 500)


class Calls:
    """What a pickle may hold, and must not be made of one."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("made by a pickle",))


def name_a_function(directory: Path) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(Calls()))


def lead_out(directory: Path) -> None:
    metadata = directory / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../0_0.distc"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose_a_file, "does not exist"),
        (shorten, "copy the checkpoint again"),
        (damage_metadata, "cannot be read"),
        (name_a_function, "cannot be read"),
        (lead_out, "not in its directory"),
    ],
)
def test_what_is_damaged_is_refused(
    harm: Callable[[Path], None],
    words: str,
    shards: Path,
    starts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Path(shutil.copytree(shards, tmp_path / "shards"))
    harm(directory)
    with pytest.raises(CheckpointError, match=words):
        hfscale.from_pretrained(directory, config=str(starts["llama"]))
    assert main(["inspect", str(directory)]) == 1
    assert words in capsys.readouterr().out
    assert not Path("made by a pickle").exists()


def test_other_weights_are_refused(shards: Path, starts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must have a config.json"):
        hfscale.from_pretrained(shards)
    assert main(["convert", str(shards), str(tmp_path / "out")]) != 0
    assert (
        main(["convert", str(shards), str(tmp_path / "out"), "--config", str(starts["gpt2"])]) != 0
    )
    model = hfscale.from_config(CONFIGS["llama"])
    with pytest.raises(CheckpointError, match="at step 0"):
        hfscale.load_state(model, shards, missing_ok=True)
    assert find_source(starts["llama"]) is None
