"""A checkpoint of another model's names is told, also where transformers' log is switched off."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.testing import RankPool

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(tp_size=2),
    "shard2": ParallelConfig(dp_shard_size=2),
    "pp2": ParallelConfig(pp_size=2, num_microbatches=2),
}


def _stored(directory: Path, rename: Callable[[str], str | None]) -> str:
    """Save a model, with other names for its tensors; ``None`` leaves one out."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = {rename(key): tensor for key, tensor in load_file(path).items()}
    kept = {key: tensor for key, tensor in tensors.items() if key is not None}
    save_file(kept, path, metadata={"format": "pt"})
    return str(directory)


def _refused(path: str, layout: ParallelConfig) -> str:
    with pytest.raises(CheckpointError) as caught:
        hfscale.from_pretrained(path, parallel=layout)
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["module.x.", "_orig_mod."])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_key_matches(pools: Pools, tmp_path: Path, layout: str, prefix: str) -> None:
    path = _stored(tmp_path, lambda key: f"{prefix}{key}")
    size = LAYOUTS[layout].total_size
    for message in pools(size).run(_refused, path, LAYOUTS[layout]):
        assert "got 21 tensors with other names" in message
        assert f"(the list of names begins with '{prefix}lm_head.weight')" in message
        assert "such as 'model.embed_tokens.weight'" in message


def _warned(path: str, layout: ParallelConfig) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hfscale.from_pretrained(path, parallel=layout)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_most_of_a_model_is_missing(pools: Pools, tmp_path: Path, layout: str) -> None:
    path = _stored(tmp_path, lambda key: key if "layers.0.mlp" in key else None)
    first, *others = pools(LAYOUTS[layout].total_size).run(_warned, path, LAYOUTS[layout])
    assert any("lacks 18 tensors of the model" in message for message in first)
    assert all("lacks" not in message for messages in others for message in messages)


def test_a_new_head_is_no_reason(tmp_path: Path) -> None:
    """What is drawn anew is small beside what is loaded: nothing is said, as warnings are errors."""
    path = _stored(tmp_path, lambda key: None if key == "lm_head.weight" else key)
    hfscale.from_pretrained(path)
