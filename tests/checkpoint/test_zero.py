"""ZeRO's partitions of models of which only a part trained, and of several model ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime.shards import local_tensor

from ..arrivals import write_zero
from ..families import config_of
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
FROZEN = ("embed", "layers.0.", "wte", ".h.0.")
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny("llama"),
    "tied": lambda: tiny("llama", tie_word_embeddings=True),
    "biases": lambda: tiny("gpt2"),
    "buffers": lambda: config_of("gemma4_text", 2),
}


def _made(kind: str, directory: Path, stage: int) -> tuple[Path, Path]:
    torch.manual_seed(0)
    start = directory / "start"
    model = AutoModelForCausalLM.from_config(MODELS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(start)
    write_zero(start, directory / "zero", stage, 0.5, FROZEN)
    return start, directory / "zero"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_frozen_weights_and_buffers_are_read(tmp_path: Path, kind: str, stage: int) -> None:
    start, zero = _made(kind, tmp_path, stage)
    expected = AutoModelForCausalLM.from_pretrained(start).state_dict()
    model = hfscale.from_pretrained(zero, config=start)
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in FROZEN))
    optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=1e-3)
    assert hfscale.load_optimizer(model, optimizer, zero) == 3
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert moments
    assert all(bool((moment == 0.05).all()) for moment in moments)


def _cut(start: str, zero: str, sizes: dict[str, int]) -> list[Tensor]:
    """This rank's weights, of the checkpoint and of the partitions."""
    found = []
    for path, more in ((start, {}), (zero, {"config": start})):
        model = hfscale.from_pretrained(path, parallel=ParallelConfig(**sizes), **more)
        found.append(torch.cat([local_tensor(p.detach()).flatten() for p in model.parameters()]))
    return found


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}, {"dp_shard_size": 2}])
def test_ranks_read_their_slices(pools: Pools, tmp_path: Path, sizes: dict[str, int]) -> None:
    start, zero = _made("llama", tmp_path, 3)
    for expected, found in pools(2).run(_cut, str(start), str(zero), sizes):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_missing_fragments_are_told(tmp_path: Path, stage: int) -> None:
    start, zero = _made("llama", tmp_path, stage)
    states = sorted((zero / "global_step3").glob("*_model_states.pt"))
    written = torch.load(states[-1], weights_only=True)
    lost = next(iter(written["frozen_param_fragments"]))
    if stage == 2:
        written["frozen_param_fragments"][lost] = torch.zeros(3)
        torch.save(written, states[-1])
        words = "is stored with the shape"
    else:
        states[-1].unlink()
        words = "model states of 3 ranks.* got 2"
    with pytest.raises(CheckpointError, match=words):
        hfscale.from_pretrained(zero, config=start)


def test_several_model_ranks_are_refused_with_the_tools(tmp_path: Path) -> None:
    start, zero = _made("llama", tmp_path, 2)
    path = zero / "global_step3" / "mp_rank_00_model_states.pt"
    path.with_name("mp_rank_01_model_states.pt").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"save_16bit_model.*deepspeed_to_transformers\.py"):
        hfscale.from_pretrained(zero, config=start)
