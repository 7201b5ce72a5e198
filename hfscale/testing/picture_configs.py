"""Make tiny configs of families that their default configs do not build: texts, and towers with placeholders."""

from typing import Any

from transformers import AutoConfig

from ..models.clone import HEAD_DIM, HIDDEN, LAYERS, merged, tiny_clone

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
}

SIDE, PATCH = 16, 4
GRID = SIDE // PATCH
# Special tokens, by the word in the name of their field: distinct, and never drawn at random.
TOKENS = {
    "image_token": 60,
    "image_patch": 60,
    "image_start": 61,
    "vision_start": 61,
    "boi_token": 61,
    "image_end": 62,
    "vision_end": 62,
    "eoi_token": 62,
    "video_token": 63,
    "video_start": 64,
    "video_end": 65,
}
LOWEST = min(TOKENS.values())
IMAGE_TOKEN = TOKENS["image_token"]
PLACEHOLDERS = ("image_token_id", "image_token_index", "image_patch_id", "video_token_index")
# Families whose encoder reads pictures alone -> inputs of a text that they are not given.
LABELS_ONLY = {"pp_formulanet": ("attention_mask",), "pix2struct": ("attention_mask",)}
# Sizes in a config that reads pictures, and in nested ones.
_TOWER: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "depth": LAYERS,
    "embed_dim": HIDDEN,
    "out_hidden_size": HIDDEN,
    "projection_dim": HIDDEN,
    "num_position_embeddings": GRID**2,
    "position_embedding_size": GRID**2,
    "window_size": SIDE,
    "fullatt_block_indexes": [LAYERS - 1],
    "deepstack_visual_indexes": [0],
    "intermediate_layers_indices": [0],
    "num_global_layers": 1,
    "max_num_tiles": 1,
    "supported_aspect_ratios": [[1, 1]],
    "vision_output_dim": 2 * HIDDEN,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": HIDDEN,
    "projector_output_dim": HIDDEN,
    "pooling_kernel_size": 2,
    "pos_emb_height": GRID,
    "pos_emb_width": GRID,
}
_WHOLE: dict[str, Any] = {
    "vision_feature_layer": -1,
    "image_seq_length": GRID**2,
    "mm_tokens_per_image": (GRID // 2) ** 2,
    "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]],
    "projection_dim": HIDDEN,
}
_SAM = {"image_size": 4 * SIDE, "window_size": 2, "global_attn_indexes": [1], "output_channels": 8, "mlp_dim": 48}
_CODES = {"base_channels": 32, "channel_multiplier": [1, 2], "num_res_blocks": 1}
_PROJECTED = {"out_hidden_size": 4 * HIDDEN, "projector_hidden_size": HIDDEN}
_STARTS = {"vision_start_token_id": TOKENS["vision_start"], "vision_end_token_id": TOKENS["vision_end"]}
_SECTIONS = {
    kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    for kind in ("full_attention", "sliding_attention")
}
_TOKEN = {"image_token_id": IMAGE_TOKEN}
_QFORMER = {"image_token_index": IMAGE_TOKEN, "num_query_tokens": 4}
# Changes that a family needs: to the config, and, in dicts, to nested ones.
FAMILIES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {GRID**2: 4}},
    **dict.fromkeys(("blip-2", "instructblip"), _QFORMER),
    "chameleon": {
        "image_token_id": IMAGE_TOKEN,
        "vq_config": {**_CODES, "num_embeddings": 4, "embed_dim": 8, "latent_channels": 8, "resolution": SIDE},
        "vocabulary_map": {"<image>": IMAGE_TOKEN, **{f"IMGIMG{letter}Z": 62 + i for i, letter in enumerate("ABCD")}},
    },
    "cohere_compass": {"text_config": {"rope_parameters": _SECTIONS}},
    "deepseek_ocr2": {
        "text_config": {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"sam_config": {**_SAM, "downsample_channels": [8, HIDDEN]}},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {**_SAM, "num_pos_feats": 8, "scale": SIDE}},
    "dots3_note": {
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN, "downsample_hidden_size": 8},
        "vision_config": {"adapter_out_dim": HIDDEN},
    },
    "emu3": {
        "image_token_id": IMAGE_TOKEN,
        "vq_config": {**_CODES, "codebook_size": 4, "hidden_size": 2 * HIDDEN},
        "vocabulary_map": {
            "<image>": IMAGE_TOKEN, "<|extra_200|>": 61, **{f"<|visual token {i:06}|>": 62 + i for i in range(4)}
        },
    },
    "florence2": {"vision_config": {
        "depths": [1, 1], "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1],
        "patch_prenorm": [False, True], "embed_dim": [16, HIDDEN], "num_heads": [2, 4], "num_groups": [2, 4],
        "window_size": 2, "max_position_embeddings": 8, "max_temporal_embeddings": 4,
    }},
    "fuyu": _TOKEN,
    "gemma4": {"vision_config": {"intermediate_size": 48}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0, "qk_nope_head_dim": 8, "index_topk": 16}},
    "granite4_vision": {
        "downsample_rate": "1/2", "deepstack_layer_map": [[0, 0], [1, 1]], "spatial_target_layers": [1, 1, 1, 1],
        "vision_config": {"hidden_size": 64},  # heads of its Q-Former are as wide
    },
    "granite_docling": {"vision_config": {"scale_factor": 2}},
    "idefics": {"vision_config": {"embed_dim": HIDDEN}},
    "instructblipvideo": {"video_token_index": IMAGE_TOKEN, "num_query_tokens": 4},
    "janus": {
        "vision_config": {"num_image_tokens": GRID**2},
        "vq_config": {**_CODES, "num_embeddings": 8, "latent_channels": 8, "num_patches": GRID},
    },
    "kimi_k25": {"projection_hidden_size": HIDDEN},
    "kosmos-2": {"latent_query_num": 4},
    "kosmos-2.5": {"latent_query_num": 4, "vision_config": {"patch_embed_hidden_size": 3 * PATCH**2}},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "llama4": {"vision_config": {"intermediate_size": 4 * HIDDEN, "vision_output_dim": HIDDEN}},
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _TOKEN),
    "mistral_large4": {"text_config": {"index_topk": 16}},
    "molmo2": {
        "image_patch_id": IMAGE_TOKEN,
        "adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": HIDDEN},
        "text_config": {"additional_vocab_size": 5},
    },
    "muse_glimmer": _PROJECTED,
    "muse_spark": {
        **_PROJECTED,
        "audio_config": {"patch_sizes": [4, 4], "hidden_sizes": [16, HIDDEN], "depths": [1, 1]},
    },
    "nemotron_h_omni": {
        "image_token_id": IMAGE_TOKEN, "projector_hidden_size": HIDDEN, "vision_hidden_size": HIDDEN,
        "vision_config": {"max_img_size": 4 * SIDE, "patch_dim": 3 * PATCH**2, "video_patch_dim": 6 * PATCH**2},
    },
    "pi0": {"chunk_size": 3, "max_state_dim": 8, "max_action_dim": 8},
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 3 * PATCH**2}},
    "pp_formulanet": {"vision_config": {
        **_SAM, "post_conv_in_channels": 8, "post_conv_mid_channels": 16, "post_conv_out_channels": HIDDEN,
        "decoder_hidden_size": HIDDEN,
    }},
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _STARTS),
    "step3p7": {"text_config": {"sliding_window": 8}},
    "udop": {"decoder_start_token_id": 0, "max_2d_position_embeddings": 64},
    "unlimited_ocr": {
        "vision_config": {"sam_config": {**_SAM, "downsample_channels": [8, HIDDEN]}},
        "text_config": {"sliding_window": 8},
    },
    "vision-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 2},
}  # fmt: skip
# Changes to a nested text config, by its own family.
TEXTS = {
    **CHANGES,
    "nemotron_h": {**CHANGES["nemotron_h"], "layers_block_type": ["linear_attention", "full_attention"]},
}


def with_pictures(family: Any, **changes: Any) -> Any:
    """Return a tiny config of a vision-language family, by name or config, with pictures of ``SIDE x SIDE``."""
    config = AutoConfig.for_model(family) if isinstance(family, str) else family
    fields = config.to_dict()
    if fields.get("vision_config", {}) is None:  # some default configs have none
        config = AutoConfig.for_model(config.model_type, vision_config={})
        fields = config.to_dict()
    own = merged(_sizes_for_pictures(fields, "patch_size" in fields, _WHOLE), FAMILIES.get(config.model_type, {}))
    return tiny_clone(config, **merged(own, changes))


def _sizes_for_pictures(fields: dict[str, Any], seeing: bool, besides: dict[str, Any]) -> dict[str, Any]:
    """Return changes to a config and nested ones; ``seeing``: the config, or one around it, reads pictures."""
    wanted = {**(_TOWER if seeing else {}), **besides, **_tokens(fields)}
    found: dict[str, Any] = dict(TEXTS.get(fields.get("model_type", ""), {}))
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            sees = name == "vision_config" or "patch_size" in value or (seeing and besides is not _WHOLE)
            inside = _sizes_for_pictures(value, sees, _WHOLE if "vision_config" in value else {})
            found[name] = {"model_type": value["model_type"], **inside}
        elif name in wanted and value is not None:
            pair = isinstance(value, (list, tuple)) and type(wanted[name]) is int
            found[name] = [wanted[name]] * 2 if pair else wanted[name]
    return {**found, **_with_sections(fields)}


def _tokens(fields: dict[str, Any]) -> dict[str, int]:
    named = [name for name in fields if name.endswith(("_id", "_index")) and isinstance(fields[name], int)]
    return {name: token for name in named for word, token in TOKENS.items() if name.startswith(word)}


def _with_sections(fields: dict[str, Any]) -> dict[str, Any]:
    """Return rotary sections (time, height, width) for such small heads, if the config has any."""
    rope = fields.get("rope_parameters") or {}
    if fields.get("model_type") not in _SECTIONED and "mrope_section" not in rope:
        return {}
    half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    return {"rope_parameters": {**rope, "mrope_section": [half // 3, half // 3, half - 2 * (half // 3)]}}


# Families with such sections whose default configs do not name them.
_SECTIONED = (
    *("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm4v_moe_text", "glm_ocr_text", "paddleocr_vl_text"),
    *("ernie4_5_vl_moe_text", "hunyuan_vl_text", "qwen2_5_omni_text"),
)
