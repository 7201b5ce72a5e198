"""Tiny clones are tiny: what a plan proves on one, it proves in seconds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfscale.families.clone import tiny_clone


@pytest.mark.parametrize(
    "family", ["llama", "kimi_linear", "bailing_hybrid", "qwen3_next", "olmo_hybrid", "nemotron_h"]
)
def test_every_width_shrinks(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_clone(AutoConfig.for_model(family)))
    assert model.num_parameters() < 100_000
