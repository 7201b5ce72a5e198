"""Tiny clones are tiny: what a plan proves on one, it proves in seconds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from hfscale.families.clone import tiny_clone


@pytest.mark.parametrize(
    "family", ["llama", "kimi_linear", "bailing_hybrid", "qwen3_next", "olmo_hybrid", "nemotron_h"]
)
def test_every_width_shrinks(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_clone(AutoConfig.for_model(family)))
    assert model.num_parameters() < 100_000


def test_a_head_over_tokens_drops_nothing() -> None:
    """Stock code drops a tenth there where a config has no word of it."""
    model = AutoModelForTokenClassification.from_config(tiny_clone(AutoConfig.for_model("llama")))
    assert model.dropout.p == 0.0


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
