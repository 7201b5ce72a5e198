"""Tiny mixtures of experts that the tests run on."""

from typing import Any

from transformers import GptOssConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

EAGER = {"experts_implementation": "eager"}  # the host's grouped matrix products take no float64
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "intermediate_size": 32}


def qwen2_moe(**changes: Any) -> PreTrainedConfig:
    """A shared expert with a gate beside the others."""
    return Qwen2MoeConfig(
        **{**_SMALL, **_EXPERTS, "shared_expert_intermediate_size": 16, **changes}
    )


def qwen3_moe(**changes: Any) -> PreTrainedConfig:
    """Nothing beside the experts; their weights sum to one."""
    return Qwen3MoeConfig(
        **{**_SMALL, **_EXPERTS, "head_dim": 8, "norm_topk_prob": True, **changes}
    )


def gpt_oss(**changes: Any) -> PreTrainedConfig:
    """Transposed weights with biases, gate and up interleaved."""
    kinds = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    own = {
        "num_local_experts": 4,
        "intermediate_size": 16,
        "head_dim": 8,
        "pad_token_id": None,
        "eos_token_id": 2,
    }
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return GptOssConfig(**{**_SMALL, **kinds, **own, **rope, **changes})
