"""Shapes beyond the dense Llama: mixtures of experts, latent attention, sinks, wide norms, ALiBi, sliding windows, ...

`scripts/family_sweep.py` runs every family; these few stand for the mechanisms in the everyday tests.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from hfscale import ParallelConfig, PlanError, plan
from hfscale.models import FAMILIES as FAMILIES_OF_PLAN
from hfscale.models.clone import LAYERS, layers_of_every_kind, shares_keys, tiny_clone
from hfscale.testing import Case, RankPool, assert_layout_equal

from ..families import config_of
from ..sweeps import cases

Pools = Callable[[int], RankPool]
EAGER = {"experts_implementation": "eager"}  # the host's grouped matrix products take no float64
_LAYER_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bloom": (
        {},
        {},
    ),  # ALiBi's biases by sample and head; all heads' queries, keys and values side by side
    "mpt": ({}, {}),  # ALiBi's biases by head
    "gpt2": ({}, {}),  # queries, keys and values fused
    "codegen": ({"num_attention_heads": 8}, {}),  # the same in four groups of heads
    "phi3": ({"num_key_value_heads": 2}, {}),  # the same of different lengths; gate and up fused
    "qwen3": ({}, {}),  # norms per head
    "apertus": ({}, {}),  # parameters inside the activation
    "gemma3_text": ({"sliding_window": 4}, {}),  # two kinds of layers: near tokens, all tokens
    "qwen2": ({"use_sliding_window": True, "sliding_window": 4, **_LAYER_KINDS}, {}),
    # sinks; experts with gate and up interleaved and biases, of which those of the output are added once
    "gpt_oss": ({"sliding_window": 4, **_LAYER_KINDS}, EAGER),
    "axk1": ({}, EAGER),  # a norm behind the mixture
    "minicpm3": ({}, {}),  # latent queries, keys and values in a dense model
    "deepseek_v3": ({}, EAGER),  # latent attention that the host's plan leaves whole
    "mixtral": ({}, EAGER),
    "qwen2_moe": (
        {"decoder_sparse_step": 2},
        EAGER,
    ),  # a dense layer, then a mixture with a shared expert
    "deepseek_v2": ({"num_experts_per_tok": 2, "topk_method": "greedy"}, EAGER),
    "granite_swa": ({}, {}),  # one attention sink per head
    "olmo2": ({}, {}),  # norms across all heads
    "olmoe": ({}, EAGER),  # the same in a mixture: its attention is kept whole
    # its head comes before its base model, which the host ties the other way round
    "camembert": ({"pad_token_id": 1, "is_decoder": True}, {}),
    "gemma2": ({}, {}),  # a scaled embedding tied to the head, capped logits
    "falcon": ({}, {}),  # attention and MLP beside each other, one key/value head
    "gpt_neox": ({}, {}),  # the same, and a head that is stored under another name
    "opt": ({}, {}),  # positions counted from the mask
    "qwen3_moe": ({}, EAGER),
    "ctrl": ({}, {}),  # the embedding is scaled in place
    "deepseek_v4": ({}, EAGER),  # several streams side by side
    "gemma4_text": ({}, {}),  # a second embedding, which all layers read
    # the same; layers that read others' keys and values; MLPs that keep what stands out of its row
    "gemma3n_text": ({}, {}),
    "roberta-prelayernorm": ({"pad_token_id": 1, "is_decoder": True}, {}),  # norms inside of blocks
    "roformer": ({"is_decoder": True}, {}),  # positions that train, and enter every attention
}
# What tensor ranks run; the others are for stages.
_OTHERS = (
    "ctrl",
    "deepseek_v4",
    "falcon",
    "gemma4_text",
    "gpt_neox",
    "opt",
    "roberta-prelayernorm",
)
TENSOR = [family for family in FAMILIES if family not in _OTHERS]


def case(family: str, layers: int = LAYERS) -> Case:
    changes, kwargs = FAMILIES[family]
    if shares_keys(AutoConfig.for_model(family)):
        layers = max(layers, layers_of_every_kind(AutoConfig.for_model(family)))
    changes = {
        name: value * (layers // LAYERS) if name == "layer_types" else value
        for name, value in changes.items()
    }
    config = tiny_clone(
        AutoConfig.for_model(family), layers=layers, **{"pad_token_id": None, **changes}
    )
    return Case(config, hf_kwargs=kwargs)


@pytest.mark.daily("gemma3n_text", "bloom", "codegen", "minicpm3", "roformer")
@pytest.mark.parametrize("family", TENSOR)
def test_tensor_ranks(pools: Pools, family: str) -> None:
    assert_layout_equal(case(family), ParallelConfig(tp_size=2), pools(2))


@pytest.mark.daily("roberta-prelayernorm")
@pytest.mark.parametrize("family", ["roberta-prelayernorm", "minicpm3"])
def test_gathered_again_where_a_block_computes_before_its_projections(
    pools: Pools, family: str
) -> None:
    """A norm, and low-rank projections: what the projections read is not the block's input."""
    layout = ParallelConfig(tp_size=2, sequence_parallel=True, sequence_regather=True)
    assert_layout_equal(replace(case(family), checkpointing=family == "minicpm3"), layout, pools(2))


@pytest.mark.daily("gpt_oss")
@pytest.mark.parametrize(
    "family",
    cases(
        ["mixtral", "qwen2_moe", "deepseek_v2", "granite_swa", "olmo2", "camembert", "gpt_oss"],
        daily=["qwen2_moe", "granite_swa", "olmo2", "gpt_oss"],
    ),
)
def test_tensor_and_data_ranks(pools: Pools, family: str) -> None:
    assert_layout_equal(case(family), ParallelConfig(tp_size=2, dp_shard_size=2), pools(4))


# Daily those that no tensor rank runs above, and those whose stages share something besides the stream.
@pytest.mark.daily("gemma2")
@pytest.mark.parametrize(
    "family",
    cases(
        [
            "gpt2",
            "bloom",
            "falcon",
            "phi3",
            "gemma2",
            "qwen3_moe",
            "mixtral",
            "deepseek_v3",
            "olmo2",
            "opt",
            "gpt_neox",
            "gpt_oss",
            "camembert",
        ],
        daily=["bloom", "falcon", "gemma2", "opt", "gpt_neox", "gpt_oss", "camembert"],
    ),
)
def test_tensor_ranks_in_stages(pools: Pools, family: str) -> None:
    assert_layout_equal(case(family, layers=4), ParallelConfig(tp_size=2, pp_size=2), pools(4))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ctrl", "deepseek_v4", "gemma4_text"])
def test_stages(pools: Pools, family: str) -> None:
    assert_layout_equal(case(family, layers=4), ParallelConfig(pp_size=2), pools(2))


@pytest.mark.daily("no convolution")
@pytest.mark.parametrize(
    ("family", "changes", "cuts_sequence"),
    [
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 2, "use_cache": False}, True),
        ("lfm2", {"layer_types": ["full_attention"] * 2}, False),
        ("deepseek_v32", {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 4}, False),
    ],
    ids=["no attention", "no convolution", "an indexer as wide as the model"],
)
def test_configs_that_leave_a_block_out_or_repeat_a_size(
    pools: Pools, family: str, changes: dict[str, Any], cuts_sequence: bool
) -> None:
    layout = ParallelConfig(tp_size=2, sequence_parallel=cuts_sequence)
    assert_layout_equal(Case(config_of(family, **changes), hf_kwargs=EAGER), layout, pools(2))


REPLACED = {"shard2": {"dp_shard_size": 2}, "tp2": {"tp_size": 2}}
REPLACED["interleaved"] = {"pp_size": 2, "pipeline_schedule": "interleaved1f1b"}


@pytest.mark.parametrize("layout", cases(REPLACED, daily=["tp2"]))
def test_attention_that_stock_code_replaces_in_the_first_pass(pools: Pools, layout: str) -> None:
    """BigBird moves the projections into full attention where texts are short."""
    case = Case(config_of("big_bird", layers=4 if layout == "interleaved" else 2))
    assert_layout_equal(case, ParallelConfig(**REPLACED[layout]), pools(2))


@pytest.mark.daily("zbv")
@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv"])
def test_what_all_layers_read_under_split_backward_passes(pools: Pools, schedule: str) -> None:
    layout = ParallelConfig(pp_size=2, pipeline_schedule=schedule, virtual_stages=2)
    assert_layout_equal(case("gemma4_text", layers=4), layout, pools(2))


def test_experts_are_cut_inside_and_routers_are_not() -> None:
    planned = plan(case("qwen2_moe").config, ParallelConfig(tp_size=2)).by_name
    assert planned["model.layers.1.mlp.experts.gate_up_proj"].local_shape({}) == (4, 24, 32)
    assert planned["model.layers.1.mlp.shared_expert.up_proj.weight"].local_shape({}) == (12, 32)
    for name in ("gate.weight", "shared_expert_gate.weight"):
        assert planned[f"model.layers.1.mlp.{name}"].cuts == ()
        assert planned[f"model.layers.1.mlp.{name}"].partial == ("tp",)
    assert planned["model.layers.0.mlp.up_proj.weight"].local_shape({}) == (24, 32)


def test_interleaved_gates_are_cut_in_pairs() -> None:
    odd = tiny_clone(AutoConfig.for_model("gpt_oss"))
    odd.intermediate_size = 15
    with pytest.raises(
        PlanError,
        match=r"divide the 15 pairs of interleaved entries of .*gate_up_proj, .* one rank: use tp_size 1, 3",
    ):
        plan(odd, ParallelConfig(tp_size=2))


def test_a_norm_in_a_mixture_is_not_taken_for_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the host's plan does not name is shared in a mixture, and a norm may read the parts of a sum.
    monkeypatch.delitem(FAMILIES_OF_PLAN, "axk1")
    with pytest.raises(PlanError, match=r"post_mlp_layernorm may read its block's output"):
        plan(case("axk1").config, ParallelConfig(tp_size=2))


def test_sliding_windows_matter() -> None:
    """The cases above would not see a window that is wider than their sequences."""
    for family in ("gemma3_text", "qwen2", "gpt_oss"):
        config = case(family).config
        assert config.sliding_window == 4 < min(Case(config).lengths)
        assert set(config.layer_types) == {"sliding_attention", "full_attention"}
