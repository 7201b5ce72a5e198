"""Hugging Face's own plans, translated."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig

from hfscale import PlanError
from hfscale.api.find_blueprint import find_blueprint, translate_host_plan
from hfscale.models import FAMILIES
from hfscale.models.blueprint import Block
from tests.tiny_models import tiny

_PLAN = {"layers.*.attn.q": "colwise", "layers.*.attn.o": "rowwise"}


def _on_meta(config: object) -> object:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_host_plans(family: str) -> None:
    blueprint = find_blueprint(_on_meta(tiny(family)))
    assert blueprint.layers == "layers"
    assert blueprint.blocks == {
        "self_attn": Block(column=("q_proj", "k_proj", "v_proj"), row=("o_proj",)),
        "mlp": Block(column=("gate_proj", "up_proj"), row=("down_proj",)),
    }


def test_per_head_norms_are_shared() -> None:
    attention = find_blueprint(_on_meta(tiny("qwen3"))).blocks["self_attn"]
    assert attention.shared == ("q_norm", "k_norm")
    assert attention.column == ("q_proj", "k_proj", "v_proj")
    assert attention.row == ("o_proj",)


def test_hfscales_own_table_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_blueprint(_on_meta(tiny("gpt2"))) is FAMILIES["gpt2"]
    monkeypatch.setitem(FAMILIES, "llama", FAMILIES["gpt2"])
    assert find_blueprint(_on_meta(tiny("llama"))) is FAMILIES["gpt2"]


def test_a_base_model_has_the_same_blueprint() -> None:
    model = _on_meta(tiny("llama"))
    assert find_blueprint(model.base_model) == find_blueprint(model)  # type: ignore[attr-defined]


def test_no_plan_at_all_is_refused_with_what_to_write() -> None:
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32)
    with pytest.raises(PlanError, match="blueprint of 'mamba'") as caught:
        find_blueprint(_on_meta(config))
    for words in (
        "tp_size=1",
        "MambaForCausalLM has no base_model_tp_plan",
        "FAMILIES",
        "column and row",
        "could not be inferred",
    ):
        assert words in str(caught.value)


def test_a_block_that_the_host_gathers_in_its_middle_stays_whole() -> None:
    plan = {
        **_PLAN,
        "layers.*.mlp.up": "colwise_gather_output",
        "layers.*.mlp.down": "rowwise_split_input",
    }
    assert translate_host_plan(plan, "newcomer").blocks.keys() == {"attn"}


def test_a_mixture_is_one_block() -> None:
    plan = {
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.shared_experts.up_proj": "colwise",
        "layers.*.mlp.shared_experts.down_proj": "rowwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    mixture = translate_host_plan({**_PLAN, **plan}, "newcomer").blocks["mlp"]
    assert mixture.cut == {"experts.gate_up_proj": (1, 2), "experts.down_proj": (2, 1)}
    assert {"up_proj", "shared_experts.up_proj"} <= set(mixture.column)
    assert {"down_proj", "shared_experts.down_proj"} <= set(mixture.row)
    assert mixture.rest_shared
    assert mixture.optional


def test_latent_attention_is_shared_inside() -> None:
    attention = translate_host_plan(
        {**_PLAN, "layers.*.attn.kv_a": "mla_kv_a_proj"}, "newcomer"
    ).blocks["attn"]
    assert attention.shared == ("kv_a",)
    assert attention.rest_shared


def test_parameters_per_head() -> None:
    assert (
        translate_host_plan({**_PLAN, "layers.*.attn": "local_params"}, "newcomer")
        .blocks["attn"]
        .own_heads
    )


@pytest.mark.parametrize("style", ["packed_colwise", "replicate", "never_heard_of"])
def test_styles_that_are_not_translated_are_refused_by_name(style: str) -> None:
    with pytest.raises(PlanError, match=f"layers.\\*.mlp.experts.gate: {style}") as caught:
        translate_host_plan({**_PLAN, "layers.*.mlp.experts.gate": style}, "newcomer")
    assert "'newcomer'" in str(caught.value)
    assert "tp_size=1" in str(caught.value)


@pytest.mark.parametrize("pattern", ["norm", "layers.*.fc1", "layers.*.mlp.experts.*.up"])
def test_rules_that_name_no_projection_of_a_block_are_refused(pattern: str) -> None:
    with pytest.raises(PlanError) as caught:
        translate_host_plan({**_PLAN, pattern: "colwise"}, "newcomer")
    assert f"{pattern}: colwise" in str(caught.value)


def test_the_hosts_embedding_rule_is_left_out() -> None:
    assert (
        translate_host_plan({**_PLAN, "embed_tokens": "embedding_rowwise"}, "newcomer").layers
        == "layers"
    )


def test_two_layer_lists_are_refused() -> None:
    with pytest.raises(PlanError, match="more than one layer list: layers, others"):
        translate_host_plan({**_PLAN, "others.*.attn.q": "colwise"}, "newcomer")


@pytest.mark.parametrize("missing", list(_PLAN))
def test_a_block_without_a_way_in_or_out_is_refused(missing: str) -> None:
    plan = {**_PLAN, "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
    del plan[missing]
    with pytest.raises(PlanError, match="blocks attn lack a projection that is sharded by columns"):
        translate_host_plan(plan, "newcomer")
