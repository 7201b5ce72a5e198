"""List tiny configs of causal-LM families, with the fields that clones need to build and train."""

from typing import Any

from transformers import AutoConfig

from ..models.clone import LAYERS, layers_of_every_kind, shares_keys, tiny_clone

# Changes that a default config needs to build and train as a decoder.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "codegen": {"n_head": 8},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        "num_hidden_layers": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm_moe_dsa": {"index_n_heads": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "modernbert-decoder": {"pad_token_id": 0},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
    },
    "phi3": {"num_key_value_heads": 2},
    "prophetnet": {"pad_token_id": 0},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    # positions are counted from the padding token's id
    "camembert": {"pad_token_id": 1},
    "data2vec-text": {"pad_token_id": 1},
    "roberta": {"pad_token_id": 1},
    "roberta-prelayernorm": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "xlm-roberta-xl": {"pad_token_id": 1},
    "xmod": {"pad_token_id": 1, "default_language": "en_XX"},
}
# Changes that turn a dense clone into a mixture.
MIXED: dict[str, dict[str, Any]] = {
    "doge": {"is_moe": True},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
}


def config_of(family: str, layers: int = LAYERS, **further: Any) -> Any:
    """Return a tiny config of ``family``, without a padding token, since random tokens could hit it."""
    changes = {"pad_token_id": None, **CHANGES.get(family, {}), **further}
    for name, value in changes.items():
        if name.startswith("layer") and isinstance(value, list) and len(value) < layers:
            changes[name] = (value * layers)[:layers]
    if changes.get("num_hidden_layers", layers) < layers:
        del changes["num_hidden_layers"]
    whole = AutoConfig.for_model(family).get_text_config()
    if shares_keys(whole):
        layers = max(layers, layers_of_every_kind(whole))
    config = tiny_clone(whole, layers=layers, **changes)
    config.pad_token_id = changes["pad_token_id"]
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config
