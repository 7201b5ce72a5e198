"""Tiny clones are tiny: what a plan proves on one, it proves in seconds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from hfscale.models.clone import (
    HEADS,
    HIDDEN,
    LAYERS,
    first_layers,
    layers_of_every_kind,
    shares_keys,
    tiny_clone,
)

from ..tiny_models import needs


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "kimi_linear",
        pytest.param("bailing_hybrid", marks=needs("bailing_hybrid")),
        "qwen3_next",
        "olmo_hybrid",
        "nemotron_h",
    ],
)
def test_every_width_shrinks(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_clone(AutoConfig.for_model(family)))
    assert model.num_parameters() < 100_000


def test_a_head_over_tokens_drops_nothing() -> None:
    """Stock code drops a tenth there where a config has no word of it."""
    model = AutoModelForTokenClassification.from_config(tiny_clone(AutoConfig.for_model("llama")))
    assert model.dropout.p == 0.0


def test_projections_into_the_stream_and_out_of_it_stay() -> None:
    """OPT-350m's, whose stages a clone is traced for where the model's own code looks at values."""
    config = AutoConfig.for_model("opt", hidden_size=1024, word_embed_proj_dim=512)
    assert tiny_clone(config).word_embed_proj_dim == tiny_clone(config).hidden_size // 2
    alike = tiny_clone(AutoConfig.for_model("opt"))
    assert alike.word_embed_proj_dim == alike.hidden_size


def test_backbones_in_stages_keep_their_lists() -> None:
    config = tiny_clone(AutoConfig.for_model("swin"), embed_dim=8)
    assert config.num_heads == [3, 6, 12, 24]


def test_sections_of_rotary_positions_fit_the_heads() -> None:
    """As many frequencies for time, height and width together as half of a head has; stored configs say how many."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {"hidden_size": 1536, "num_attention_heads": 12, "rope_parameters": rope}
    small = tiny_clone(AutoConfig.for_model("qwen2_vl", text_config=text)).get_text_config()
    assert small.rope_parameters["mrope_section"] == [2, 1, 1]
    assert 2 * sum([2, 1, 1]) == small.hidden_size // small.num_attention_heads


def test_fields_are_known_by_the_names_that_most_configs_give_them() -> None:
    text = tiny_clone(AutoConfig.for_model("kosmos-2")).text_config
    assert (text.embed_dim, text.layers, text.attention_heads) == (HIDDEN, LAYERS, HEADS)


def test_lists_of_layers_are_as_long_as_there_are_layers() -> None:
    gemma = tiny_clone(AutoConfig.for_model("gemma3n")).text_config
    assert gemma.intermediate_size == [48, 48]
    assert len(gemma.activation_sparsity_pattern) == LAYERS
    glimmer = tiny_clone(AutoConfig.for_model("muse_glimmer")).text_config
    # layers with and without rotations are of the kinds that they were of
    assert dict(zip(glimmer.layer_types, glimmer.layer_rope_theta, strict=True)) == {
        "sliding_attention": 10000.0,
        "full_attention": 0,
    }


def test_layers_that_read_the_keys_of_others_stay() -> None:
    whole = AutoConfig.for_model("gemma3n_text")
    assert (layers_of_every_kind(whole), shares_keys(whole)) == (3, True)
    assert [tiny_clone(whole, layers=layers).num_kv_shared_layers for layers in (2, 3, 6)] == [
        0,
        1,
        4,
    ]
    # 15 of 35.
    assert [first_layers(whole, layers).num_kv_shared_layers for layers in (4, 22)] == [
        0,
        2,
    ]


def test_heads_that_make_up_the_inner_width_do_in_a_clone() -> None:
    small = tiny_clone(AutoConfig.for_model("mamba2"))
    assert small.num_heads * small.head_dim == small.expand * small.hidden_size


@needs("molmo2_text")
def test_layers_that_are_named_are_layers_of_the_clone() -> None:
    assert tiny_clone(AutoConfig.for_model("molmo2_text")).rope_scaling_layers == [0, 1]


def test_a_config_inside_computes_what_it_would() -> None:
    text = tiny_clone(AutoConfig.for_model("kimi_k25")).text_config
    assert text.head_dim == text.qk_rope_head_dim


def test_changes_reach_the_configs_inside() -> None:
    made = tiny_clone(
        AutoConfig.for_model("llava"), text_config={"hidden_size": 16}, image_token_index=9
    )
    assert (
        made.text_config.hidden_size,
        made.text_config.num_hidden_layers,
        made.image_token_index,
    ) == (16, LAYERS, 9)


@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("dory", marks=needs("dory")),
        pytest.param("inkling2_loop_text", marks=needs("inkling2_loop_text")),
    ],
)
def test_layers_that_run_several_times_do_in_a_clone(family: str, layers: int) -> None:
    """Configs say which, by how many there are before and behind them or by two indices."""
    config = tiny_clone(AutoConfig.for_model(family), layers=layers)
    assert len(config.layer_types) == config.num_hidden_layers == layers
    if family == "dory":
        assert config.n_recurrent_layers > 0
        assert min(config.n_input_layers, config.n_output_layers) == (layers > 2)
    else:
        assert 0 < config.loop_layer_index_start < config.loop_layer_index_end <= layers
    model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() < 50_000 * layers
    ids = torch.randint(3, 60, (1, 6))
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("family", [pytest.param("dory", marks=needs("dory"))])
def test_the_first_layers_of_sections(family: str) -> None:
    config = first_layers(AutoConfig.for_model(family), 20)
    assert (config.n_input_layers, config.n_recurrent_layers, config.n_output_layers) == (8, 12, 0)
    config.validate_architecture()
