"""A dense model and the mixture of experts made of it: equal outputs, and everything that must be refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hfscale
from hfscale.extras.upcycle.moe_targets import FAMILIES

from .dense import IDS, distance, load, logits, save_dense, stored

LLAMA3 = {
    **{
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
    },
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
# Per family, features that have to carry over: each changes the logits.
FEATURES: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {
            "tie_word_embeddings": True,
            "head_dim": 16,
            "rope_parameters": LLAMA3,
            "hidden_act": "gelu",
        },
        {
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            "sliding_window": 3,
        },
    ],
    "mistral": [
        {"sliding_window": 5, "head_dim": 16},
        {"tie_word_embeddings": True, "sliding_window": None},
    ],
    "qwen2": [
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        {},
    ],
    "qwen3": [
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "head_dim": 16},
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 3,
            "attention_bias": True,
        },
    ],
    "olmo2": [{"attention_bias": True, "num_key_value_heads": 4}, {"tie_word_embeddings": True}],
    "granite": [
        {
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
        {"residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ],
}
CASES = [(family, index) for family, several in FEATURES.items() for index in range(len(several))]


def test_every_family_is_tested() -> None:
    assert FEATURES.keys() == FAMILIES.keys()


@pytest.mark.daily(
    "qwen2-0-torch.float64-1e-12",
    "qwen3-1-torch.float64-1e-12",
    "mistral-1-torch.float32-1e-05",
    "olmo2-0-torch.float32-1e-05",
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str
)
@pytest.mark.parametrize(("family", "features"), CASES)
def test_a_mixture_computes_what_the_dense_model_does(
    tmp_path: Path, family: str, features: int, dtype: torch.dtype, tolerance: float
) -> None:
    source = save_dense(tmp_path / "dense", family, dtype, **FEATURES[family][features])
    target = hfscale.upcycle(source, tmp_path / "mixture", num_experts=4, top_k=2)
    mixture = load(target)
    assert target == tmp_path / "mixture"
    assert mixture.config.model_type == FAMILIES[family].target
    assert mixture.dtype == dtype
    assert {tensor.dtype for tensor in stored(target).values()} == {dtype}
    assert distance(load(source), mixture) < tolerance
    plain = save_dense(tmp_path / "plain", family, dtype)
    if FEATURES[family][features]:
        assert distance(load(source), load(plain)) > 1e-3  # the features do say something


@pytest.mark.daily("granite", "qwen2")
@pytest.mark.parametrize("family", FEATURES)
def test_both_write_the_same(tmp_path: Path, family: str) -> None:
    source = save_dense(tmp_path / "dense", family, torch.float64, **FEATURES[family][0])
    mixture = load(hfscale.upcycle(source, tmp_path / "mixture", num_experts=4))
    # Past the windows, from the cache.
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
    }
    assert torch.equal(load(source).generate(IDS, **options), mixture.generate(IDS, **options))


def test_tokens_go_to_different_experts(tmp_path: Path) -> None:
    target = hfscale.upcycle(save_dense(tmp_path / "dense"), tmp_path / "mixture")
    output = load(target)(IDS, output_router_logits=True)
    for scores in output.router_logits:
        assert len(scores.topk(2).indices.unique()) > 4


@pytest.mark.daily("granite", "qwen2")
@pytest.mark.parametrize("family", FEATURES)
def test_a_model_in_memory_becomes_the_same_mixture(tmp_path: Path, family: str) -> None:
    source = save_dense(tmp_path / "dense", family, **FEATURES[family][0])
    written = load(hfscale.upcycle(source, tmp_path / "mixture", num_experts=4, reinitialize=0.5))
    dense = load(source)
    dense.generation_config.temperature = 0.7
    for given in (source, dense):
        made = hfscale.upcycle(given, num_experts=4, reinitialize=0.5)
        assert type(made) is type(written)
        state = made.state_dict()
        for name, tensor in written.state_dict().items():
            assert torch.equal(state[name], tensor), name
    assert made.generation_config.temperature == 0.7
    before = logits(dense)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert torch.equal(logits(dense), before)  # no memory is shared


def test_the_weights_in_memory_count_whatever_its_config_says(tmp_path: Path) -> None:
    dense = load(save_dense(tmp_path / "dense")).to(torch.bfloat16)
    dense.config.dtype = "float32"
    target = hfscale.upcycle(dense, tmp_path / "mixture", num_experts=2)
    assert load(target).dtype == hfscale.upcycle(dense, num_experts=2).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_shards_in_shards_out(tmp_path: Path, family: str) -> None:
    source = save_dense(tmp_path / "dense", family, max_shard_size="20KB", tie_word_embeddings=True)
    whole = save_dense(tmp_path / "whole", family, tie_word_embeddings=True)
    assert len(list(source.glob("*.safetensors"))) > 3
    target = hfscale.upcycle(source, tmp_path / "mixture", num_experts=4, max_shard_size="20KB")
    assert len(list(target.glob("*.safetensors"))) > 3
    assert (target / "model.safetensors.index.json").is_file()
    expected = stored(hfscale.upcycle(whole, tmp_path / "one", num_experts=4))
    found = stored(target)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_second_layer(tmp_path: Path, family: str) -> None:
    source = save_dense(tmp_path / "dense", family, num_hidden_layers=5)
    mixture = load(hfscale.upcycle(source, tmp_path / "mixture", num_experts=4, every=2))
    kinds = [hasattr(layer.mlp, "experts") for layer in mixture.model.layers]
    assert kinds == [False, True, False, True, False]
    assert distance(load(source), mixture) < 1e-5


def test_a_shared_expert_gives_half(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense", "qwen2")
    found = stored(hfscale.upcycle(source, tmp_path / "mixture", num_experts=2))
    dense = stored(source)
    for projection, share in (("gate", 1), ("up", 1), ("down", 0.5)):
        whole = dense[f"model.layers.1.mlp.{projection}_proj.weight"]
        assert torch.equal(
            found[f"model.layers.1.mlp.shared_expert.{projection}_proj.weight"], whole
        )
        assert torch.equal(
            found[f"model.layers.1.mlp.experts.1.{projection}_proj.weight"], whole * share
        )


def test_it_loads_with_hfscale_and_trains(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense")
    target = hfscale.upcycle(source, tmp_path / "mixture", num_experts=4)
    model = hfscale.from_pretrained(target).train()
    batch = {"input_ids": IDS, "labels": IDS}
    dense = hfscale.from_pretrained(source).train()
    assert hfscale.train_step(model, batch).item() == pytest.approx(
        hfscale.train_step(dense, batch).item(), rel=1e-5
    )
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name  # the router's too


def test_all_that_trains_gets_a_gradient_beside_a_shared_expert(tmp_path: Path) -> None:
    model = hfscale.upcycle(save_dense(tmp_path / "dense", "qwen2"), num_experts=4).train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_tokenizer_and_generation_come_along_and_the_card_does_not(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense")
    kept = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "merges.txt",
        "chat_template.jinja",
    ]
    for name in [*kept, "README.md", "optimizer.pt"]:
        (source / name).write_text(name)
    GenerationConfig(temperature=0.3, do_sample=True, eos_token_id=5).save_pretrained(source)
    target = hfscale.upcycle(source, tmp_path / "mixture", num_experts=2)
    assert all((target / name).read_text() == name for name in kept)
    assert not {"README.md", "optimizer.pt"} & {path.name for path in target.iterdir()}
    assert GenerationConfig.from_pretrained(target).temperature == 0.3
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert config["num_local_experts"] == 2
