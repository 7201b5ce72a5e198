"""What other trainers wrote is called by its name, and its tool named, at every way in; a run does not begin anew."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.cli import main
from hfscale.integrations.trainer.files import resumed_from
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
# files -> words that name the trainer or its tool
WRITTEN = {
    "fsdp by rank": (["pytorch_model_fsdp_0_rank0.bin"], "FULL_STATE_DICT"),
    "deepspeed": (
        ["zero_to_fp32.py", "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"],
        "zero_to_fp32.py",
    ),
    "deepspeed, a step": (["bf16_zero_pp_rank_0_mp_rank_00_model_states.pt"], "DeepSpeed"),
    "megatron": (["common.pt", "metadata.json", ".metadata", "__0_0.distcp"], "Megatron"),
    "megatron, parent": (
        ["latest_checkpointed_iteration.txt", "iter_0000010/common.pt"],
        "Megatron",
    ),
    "megatron, older": (["iter_0000010/mp_rank_00/model_optim_rng.pt"], "Megatron"),
    "torchtitan, parent": (["step-10/.metadata", "step-10/__0_0.distcp"], "give "),
    "torch.save": (["model.pt", "optimizer.pt"], "torch.save"),
    "lightning": (["checkpoints/last.ckpt"], "torch.save"),
    "meta": (["consolidated.00.pth", "params.json"], "convert_llama_weights"),
    "gguf, several": (["model-Q4_0.gguf", "model-Q8_0.gguf"], "GGUF file"),
}


def put(directory: Path, files: list[str]) -> Path:
    for name in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"")
    return directory


@pytest.fixture(scope="module")
def model() -> Any:
    return hfscale.from_config(tiny("llama"))


@pytest.mark.parametrize("kind", WRITTEN)
def test_every_way_in(
    kind: str, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, words = WRITTEN[kind]
    directory = put(tmp_path / "there", files)
    mesh = runtime_of(model).mesh
    ways: list[Callable[[], Any]] = [
        lambda: hfscale.from_pretrained(directory),
        lambda: hfscale.load_state(model, directory),
        lambda: hfscale.load_state(model, directory, missing_ok=True),
        lambda: resumed_from(str(directory), tmp_path, mesh),
    ]
    for way in ways:
        with pytest.raises(CheckpointError) as caught:
            way()
        assert words in str(caught.value)
    directory.rename(tmp_path / "checkpoint-3")
    with pytest.raises(CheckpointError) as caught:  # and not at step 0
        resumed_from(True, tmp_path, mesh)
    assert words in str(caught.value)
    for arguments in (
        ["inspect", str(tmp_path)],
        ["convert", str(tmp_path / "checkpoint-3"), str(tmp_path / "out")],
    ):
        assert main(arguments) != 0
        told = capsys.readouterr()
        assert words in told.out + told.err


def test_weights_that_are_read_beside_others(tmp_path: Path) -> None:
    """DeepSpeed and Trainer may write plain weights too."""
    stock = hfscale.from_config(tiny("llama"))
    hfscale.save_pretrained(stock, tmp_path)
    put(
        tmp_path,
        ["zero_to_fp32.py", "global_step3/mp_rank_00_model_states.pt", "optimizer.pt", "notes.pt"],
    )
    hfscale.from_pretrained(tmp_path)


FORGIVEN = {
    "absent": [],
    "empty": None,
    "notes": ["train.log", "config.json", "runs/events.out.tfevents.1", "wandb/run.wandb"],
    "an interrupted save": [".step-1.incomplete/rank-00000.safetensors"],
    "hidden": [".cache/file"],
}


@pytest.mark.parametrize("case", FORGIVEN)
def test_a_run_begins_where_nothing_is(case: str, model: Any, tmp_path: Path) -> None:
    directory = tmp_path / "states"
    files = FORGIVEN[case]
    if files is None:
        directory.mkdir()
    put(directory, files or [])
    assert hfscale.load_state(model, directory, missing_ok=True).step == 0


def refused(directory: str) -> str:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(tp_size=2))
    with pytest.raises(CheckpointError) as caught:
        hfscale.load_state(model, directory, missing_ok=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model.safetensors"], "hfscale.from_pretrained reads them"),
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter"),
        (["data/0.ocdbt"], "other files (data/0.ocdbt, for example)"),
    ],
)
def test_a_run_does_not_begin_beside_other_weights(
    files: list[str], words: str, pools: Pools, tmp_path: Path
) -> None:
    """On any rank."""
    put(tmp_path, files)
    first, second = pools(2).run(refused, str(tmp_path))
    assert words in first
    assert words in second


def test_a_state_of_accelerates(tmp_path: Path, model: Any) -> None:
    """Plain weights without a Trainer's state are not an interrupted save."""
    put(tmp_path, ["random_states_0.pkl", "optimizer.bin"])
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a state of Accelerate's save_state"):
        resumed_from(str(tmp_path), tmp_path.parent, runtime_of(model).mesh)
