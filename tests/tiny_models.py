"""Tiny configs of the families the tests run on."""

from typing import Any

import pytest
from transformers import (
    CONFIG_MAPPING,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hfscale import ParallelConfig
from hfscale.api.build_plan import build_plan
from hfscale.plan import StagePlan

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def needs(family: str) -> pytest.MarkDecorator:
    """Of a test of ``family``, which the oldest transformers may not have yet."""
    return pytest.mark.skipif(
        family not in CONFIG_MAPPING, reason=f"this transformers has no {family}"
    )


def tiny(family: str, **changes: Any) -> PreTrainedConfig:
    """A config of ``family`` that builds in milliseconds."""
    if family == "gpt2":
        defaults = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 64}
        still = {
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return GPT2Config(**{**defaults, **still, **changes})
    kinds = {
        "llama": LlamaConfig,
        "mistral": MistralConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
    }
    extra = {"head_dim": 8} if family == "qwen3" else {}
    return kinds[family](**{**_SMALL, **extra, **changes})


def assign_stages(model: Any, layout: ParallelConfig, ranks: Any = None) -> StagePlan:
    """The stages of a model's plan."""
    stages = build_plan(model, layout, ranks).stages
    assert stages is not None
    return stages
