"""The commands of docs/migrating.md, each on a directory that the real library wrote."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import hfscale
from hfscale.cli import main
from hfscale.testing import RankPool

from ..arrivals import WRITES_SLICES, write_shards, write_zero
from ..gguf_files import write_gguf
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
CONFIG = tiny("llama", tie_word_embeddings=False, hidden_size=64, intermediate_size=96)


def write_slices(start: Path, out: Path, pools: Pools) -> None:
    pools(2).run(write_shards, str(start), str(out), "slices")


def write_dcp(start: Path, out: Path, pools: Pools) -> None:
    pools(2).run(write_shards, str(start), str(out), "state dict")


def write_trainers(start: Path, out: Path, pools: Pools) -> None:
    pools(2).run(write_shards, str(start), str(out), "accelerate")
    (out / "trainer_state.json").write_text('{"global_step": 3}')


def write_accelerates(start: Path, out: Path, pools: Pools) -> None:
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(start)
    accelerator.prepare(model)
    accelerator.save_state(str(out))
    accelerator.free_memory()


def write_llama_cpp(start: Path, out: Path, pools: Pools) -> None:
    out.mkdir()
    write_gguf(out / "model.gguf", CONFIG)


WRITERS: dict[str, Callable[[Path, Path, Pools], None]] = {
    "shard-00001-model-00001-of-00001.safetensors": write_slices,
    ".metadata": write_dcp,
    "pytorch_model_fsdp_0/": write_trainers,
    "random_states_0.pkl": write_accelerates,
    "latest": lambda start, out, pools: write_zero(start, out, stage=3, gradient=0.0),
    "model-Q4_K_M.gguf": write_llama_cpp,
}
"""The first file that a row names -> what writes such a directory."""
ELSEWHERE = {
    "optimizer.pt": "tests/integrations/trainer/test_checkpoints.py",
    "steps = hfscale.load_optimizer(model, optimizer, DIR)": "tests/integrations/test_foreign_state.py",
    "hfscale inspect DIR": "tests/checkpoint/test_migrating.py",
}
"""Rows that are no directory of weights, or of which more is asked, and the tests of them."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("start")
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).save_pretrained(directory)
    return directory


def test_every_row_has_a_directory() -> None:
    table = PAGE.read_text().partition("| there | here |\n|---|---|\n")[2].partition("\n\n")[0]
    named = [re.findall(r"`([^`]+)`", row)[0] for row in table.splitlines()]
    assert named == [
        *list(WRITERS)[:4],
        "optimizer.pt",
        "latest",
        *list(ELSEWHERE)[1:2],
        "model-Q4_K_M.gguf",
        *list(ELSEWHERE)[2:],
    ]
    assert all((PAGE.parents[1] / test).is_file() for test in ELSEWHERE.values())


@pytest.mark.parametrize("name", WRITERS)
def test_its_commands(
    name: str, start: Path, pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.startswith("shard-") and not WRITES_SLICES:
        pytest.skip("this transformers writes none")
    there = tmp_path / "there"
    WRITERS[name](start, there, pools)
    is_gguf = name.endswith(".gguf")
    base = [] if is_gguf else ["--config", str(start)]
    assert main(["inspect", str(there)]) == 0
    assert "hfscale convert" in capsys.readouterr().out
    assert main(["convert", str(there), str(tmp_path / "out"), *base]) == 0
    options: dict[str, Any] = {} if is_gguf else {"config": str(start)}
    loaded = hfscale.from_pretrained(there, **options).state_dict()
    stock = (
        AutoModelForCausalLM.from_pretrained(there, gguf_file="model.gguf")
        if is_gguf
        else AutoModelForCausalLM.from_pretrained(start)
    )
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for key, value in stock.state_dict().items():
        assert torch.equal(loaded[key], value), key
        assert torch.equal(converted[key], value), key
