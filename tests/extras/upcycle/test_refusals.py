"""What cannot be upcycled, and what is left after a failure."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import LlamaForSequenceClassification

import hfscale
from hfscale import CheckpointError, ConfigError
from hfscale.extras.upcycle import expert_tensors
from hfscale.extras.upcycle.expert_tensors import Upcycling
from hfscale.extras.upcycle.moe_targets import upcycled_config

from .dense import SMALL, distance, load, save_dense, stored


@pytest.mark.parametrize(
    ("family", "features", "arguments", "message"),
    [
        (
            "llama",
            {"mlp_bias": True},
            {},
            "mlp_bias=True does not fit a mixtral config.*with mlp_bias=False",
        ),
        (
            "llama",
            {"attention_bias": True},
            {},
            "attention_bias=True does not fit a mixtral config",
        ),
        ("granite", {"mlp_bias": True}, {}, "mlp_bias=True does not fit a granitemoe config"),
        (
            "llama",
            {},
            {"every": 2},
            "every=2 leaves layers dense, but in a mixtral model every layer.*use every=1",
        ),
        ("qwen3", {}, {"every": 4}, "every=4 is invalid with 3 layers"),
        (
            "llama",
            {},
            {"num_experts": 0},
            "num_experts=0 is invalid: use a whole number of at least 1",
        ),
        (
            "llama",
            {},
            {"num_experts": 4, "top_k": 5},
            "top_k=5 of num_experts=4 is invalid: use 1 to 4",
        ),
        ("llama", {}, {"top_k": 0}, "top_k=0 is invalid: use a whole number of at least 1"),
        ("llama", {}, {"noise": -1.0}, "noise=-1.0 is invalid"),
        ("llama", {}, {"reinitialize": 1.5}, "reinitialize=1.5 is invalid.*of at most 1"),
        (
            "qwen3",
            {"use_sliding_window": True, "max_window_layers": 1},
            {},
            "layer_types mix full_attention and sliding_attention, but a qwen3_moe model has one window",
        ),
        (
            "olmo",
            {},
            {},
            "'olmo' model cannot be upcycled: its layer norms have no weights.*llama -> mixtral",
        ),
        ("mixtral", {}, {}, "it is a mixture of experts already"),
        (
            "gemma",
            {"head_dim": 8},
            {},
            "has no mixture of experts with such layers.*hfscale/extras/upcycle/moe_targets.py",
        ),
        (
            "llama",
            {"mlp_bias": True},
            {"every": 2},
            "every=2 leaves.*; mlp_bias=True does not fit",
        ),  # all at once
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, family: str, features: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    source = save_dense(tmp_path / "dense", family, **features)
    with pytest.raises(ConfigError, match=message):
        hfscale.upcycle(source, tmp_path / "mixture", **arguments)
    assert not (tmp_path / "mixture").exists()


def test_quantized_weights_are_refused() -> None:
    config = LlamaConfig(**SMALL, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match=r"its weights are quantized .*dequantize\(\)"):
        upcycled_config(config, num_experts=2, top_k=1, every=1)


def test_a_router_that_learns_from_nothing_is_warned_about(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense")
    with pytest.warns(UserWarning, match="top_k=1: normalized routing weights are then always 1"):
        mixture = load(hfscale.upcycle(source, tmp_path / "mixture", num_experts=4, top_k=1))
    assert distance(load(source), mixture) < 1e-5


def test_other_models_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL)
    with pytest.raises(
        ConfigError, match="LlamaForSequenceClassification cannot be upcycled, because only causal"
    ):
        hfscale.upcycle(LlamaForSequenceClassification(config))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ConfigError,
        match=r"not a full model in memory \(it has no weights \(meta device\)\): save it",
    ):
        hfscale.upcycle(empty)
    with pytest.raises(ConfigError, match=r"not a full model in memory \(hfscale parallelized it"):
        hfscale.upcycle(hfscale.from_config(config))
    with pytest.raises(
        ConfigError, match=r"a Linear is not a model of transformers.*merge_and_unload"
    ):
        hfscale.upcycle(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense")
    tensors = load_file(source / "model.safetensors")
    lost = {name: t for name, t in tensors.items() if "layers.1.mlp.up" not in name}
    save_file(lost, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"lacks model.layers.1.mlp.up_proj.weight: save the model again"
    ):
        hfscale.upcycle(source, tmp_path / "mixture")
    narrow = {
        name: t[:5].clone() if "layers.1.mlp.up" in name else t for name, t in tensors.items()
    }
    save_file(narrow, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"has the shape \(5, 32\) but its config says \(48, 32\)"
    ):
        hfscale.upcycle(source, tmp_path / "mixture")
    mixed = {name: t.bfloat16() if "layers.1.mlp.up" in name else t for name, t in tensors.items()}
    save_file(mixed, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"several dtypes, torch.bfloat16, torch.float32"):
        hfscale.upcycle(source, tmp_path / "mixture")
    (source / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"neither model.safetensors nor model.safetensors.index.json"
    ):
        hfscale.upcycle(source, tmp_path / "mixture")
    (source / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json is damaged"):
        hfscale.upcycle(source, tmp_path / "mixture")
    shutil.rmtree(source)
    source.mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        hfscale.upcycle(source, tmp_path / "mixture")
    assert not (tmp_path / "mixture").exists()


def test_a_head_stored_under_its_tied_name_is_found(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense", tie_word_embeddings=True)
    expected = load(source)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    # Old checkpoints have such tables.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert (
        distance(expected, load(hfscale.upcycle(source, tmp_path / "mixture", num_experts=2)))
        < 1e-5
    )


def test_no_such_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(expert_tensors, "snapshot_download", offline)
    with pytest.raises(
        CheckpointError, match=r"'some/where' is neither a local directory nor .*no network"
    ):
        hfscale.upcycle("some/where")


def test_the_dense_model_is_not_written_over(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense")
    with pytest.raises(
        ConfigError, match="holds the dense model, which would be overwritten: name another"
    ):
        hfscale.upcycle(source, tmp_path / "x" / ".." / "dense")
    assert load(source).config.model_type == "llama"


def test_a_write_that_fails_leaves_the_earlier_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_dense(tmp_path / "dense")
    target = hfscale.upcycle(source, tmp_path / "mixture", num_experts=2)
    before = stored(target)

    def fail(self: Upcycling, layer: int) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(Upcycling, "_gates", fail)
    with pytest.raises(CheckpointError, match="could not be written: no space left"):
        hfscale.upcycle(source, target, num_experts=4)
    assert sorted(stored(target)) == sorted(before)
    assert load(target).config.num_local_experts == 2
    assert not (target / ".incomplete").exists()


def test_files_load_where_the_format_is_checked(tmp_path: Path) -> None:
    target = hfscale.upcycle(save_dense(tmp_path / "dense"), tmp_path / "mixture")
    with safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
