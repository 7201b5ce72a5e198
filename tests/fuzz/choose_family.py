"""Which families are drawn, how often, and what may change in their configs: pure."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from hfscale.models.clone import HIDDEN, VOCABULARY
from hfscale.models.module_kinds import EXPERT_FIELDS

from ..families import MIXED, config_of
from .draw import is_dropout

COMMON = [
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "phi", "phi3",
    "opt", "bloom", "falcon", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmo2",
    "cohere2", "starcoder2", "stablelm", "gptj", "granite", "granitemoe", "llama4_text", "smollm3", "glm4",
    "glm4_moe", "olmoe", "qwen3_next",
]  # fmt: skip
# Classes that keep a loss of their own: a plain loop trains them.
OWN_LOSS = [
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "mvp", "pegasus",
    "plbart", "prophetnet", "trocr", "whisper", "xlnet",
]  # fmt: skip
# Families without a clone that stock code can train.
_LEFT_OUT = [
    "blt", "cohere_compass_text", "emu3", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant",
    "git", "longcat_flash", "mllama", "musicgen", "musicgen_melody", "qwen4_exp", "reformer", "xlm", "xlstm",
    "zamba", "zamba2",
]  # fmt: skip
# Families whose stock code goes through chunks of tokens in Python, which takes seconds.
SLOW = [
    "bailing_hybrid", "kimi_linear", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    "olmo_hybrid", "minimax", "rwkv", "lfm3", "mamba", "falcon_mamba", "mamba2", "jamba", "recurrent_gemma",
    "nemotron_h", "bamba", "granitemoehybrid", "falcon_h1",
]  # fmt: skip
# Families of which bitsandbytes quantizes a clone that is wide enough for whole blocks.
WIDE = [
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3", "olmo2", "starcoder2", "granite", "smollm3",
    "stablelm", "cohere2", "mixtral", "qwen3_moe",
]  # fmt: skip
_SWITCHES = [
    "attention_bias", "mlp_bias", "qkv_bias", "use_bias", "bias", "use_qkv_bias", "attention_out_bias",
    "add_bias_linear", "enable_bias", "parallel_attn", "multi_query", "new_decoder_architecture",
    "use_parallel_residual", "qk_layernorm", "use_qk_norm", "norm_topk_prob", "do_layer_norm_before",
    "scale_attn_by_inverse_layer_idx", "scale_embedding", "lm_head_bias", "use_sliding_window",
    "tie_word_embeddings", "alibi", "layer_norm_elementwise_affine", "no_bias", "use_mem_rope",
    "reorder_and_upcast_attn",
]  # fmt: skip
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_inner")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "sliding_window": (4, 6, 16),
    "final_logit_softcapping": (5.0, 20.0),
    "attn_logit_softcapping": (5.0, 30.0),
    "hidden_act": ("silu", "gelu", "relu", "gelu_pytorch_tanh"),
    "activation_function": ("gelu", "relu", "gelu_new"),
    "logit_scale": (0.25, 1.0),
    "max_position_embeddings": (32, 33, 64),
    "moe_intermediate_size": (24, 20, 16),
    "num_experts_per_tok": (1, 2, 3),
    "partial_rotary_factor": (0.5, 1.0),
    "rms_norm_eps": (1e-6, 1e-3),
    "first_k_dense_replace": (0, 1),
    "n_shared_experts": (1, 2),
}


def families() -> list[str]:
    """Every family with a causal language model, in a stable order."""
    return [name for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name not in _LEFT_OUT]


def choose_family(random: Random) -> str:
    """An ordinary one half of the time."""
    return random.choice(COMMON) if random.random() < 0.55 else random.choice(families())


def fields_of(family: str) -> dict[str, Any]:
    """Fields and values of a family's tiny config."""
    try:
        return dict(config_of(family, **MIXED.get(family, {})).to_dict())
    except Exception:  # a config that cannot be made tiny fails in the run, by name
        return dict(AutoConfig.for_model(family).get_text_config().to_dict())


def linear_names(family: str, config: dict[str, Any], layers: int) -> list[str]:
    """Names of the linear modules of a clone, for adapters; none of one that cannot be built."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(family, layers, **config))
    except Exception:  # as above
        return []
    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    return sorted(
        {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, kinds)}
    )


def has_experts(found: dict[str, Any]) -> bool:
    """Whether the clone is a mixture."""
    return any(isinstance(found.get(name), int) and found[name] > 1 for name in EXPERT_FIELDS)


def choose_config(
    random: Random, family: str, found: dict[str, Any], wild: float
) -> dict[str, Any]:
    """Changes to the clone of ``family``; each is made with a chance of ``wild``."""
    changes: dict[str, Any] = dict(MIXED.get(family, {}) if random.random() < 0.5 else {})

    def sometimes() -> bool:
        return random.random() < wild

    for name in _SWITCHES:
        if isinstance(found.get(name), bool) and sometimes():
            changes[name] = not found[name]
    for name, values in _CHOICES.items():
        if name in found and not isinstance(found[name], (list, dict, bool)) and sometimes():
            changes[name] = random.choice(values)
    changes.update(_choose_sizes(random, found, sometimes))
    if sometimes():
        last = int(changes.get("vocab_size", found.get("vocab_size") or VOCABULARY)) - 1
        changes["pad_token_id"] = random.choice((0, 1, 5, last // 2, last))
    if random.random() < 0.08:
        changes.update(_choose_dropout(random, found))
    return changes


def _choose_sizes(
    random: Random, found: dict[str, Any], sometimes: Callable[[], bool]
) -> dict[str, int]:
    changes = {}
    if "vocab_size" in found and sometimes():
        changes["vocab_size"] = random.choice((64, 65, 66, 71, 101, 130))
    for name in _WIDTHS:
        if isinstance(found.get(name), int) and sometimes():
            changes[name] = random.choice((32, 40, 44, 50, 51, 64))
    if isinstance(found.get("num_key_value_heads"), int) and sometimes():
        changes["num_key_value_heads"] = random.choice((1, 2, 4))
    if has_experts(found) and sometimes():
        count = random.choice((4, 6, 8, HIDDEN))
        changes.update({name: count for name in EXPERT_FIELDS if isinstance(found.get(name), int)})
    return changes


def _choose_dropout(random: Random, found: dict[str, Any]) -> dict[str, float]:
    shares = {
        name
        for name, value in found.items()
        if is_dropout(name) and isinstance(value, (int, float))
    }
    shares = {name for name in shares if not isinstance(found[name], bool)}
    return {name: random.choice((0.1, 0.3)) for name in sorted(shares) if random.random() < 0.7}
