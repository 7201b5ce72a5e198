"""What tiny clones of families need besides their defaults, for scripts/family_sweep.py."""

from typing import Any

from transformers import (
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    CLIPModel,
    SiglipModel,
)

from hfscale.testing import plain

# What a default config needs besides to build and train as a decoder.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": {"head_dim": 4},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "codegen": {"n_head": 8},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        "num_hidden_layers": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v3": {"head_dim": 4, "first_k_dense_replace": 1},
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
    "youtu": {"head_dim": 4},
}
# What makes a mixture of a clone that is dense otherwise.
MIXED: dict[str, dict[str, Any]] = {
    "doge": {"is_moe": True},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
}
_ROBERTA, _BART = {"pad_token_id": 1}, {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 3}
_T5 = {"pad_token_id": 0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "pad_token_id": 0}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40, **_BART}
_ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {},
    "bert": {},
    "deberta-v2": _DEBERTA,
    "distilbert": {"pad_token_id": 0},
    "electra": {},
    "roberta": _ROBERTA,
}
# (family, class, what makes its batches, changes to the clone)
OTHERS: list[tuple[str, Any, plain.Maker, dict[str, Any]]] = [
    *(
        (family, AutoModelForSequenceClassification, plain.sequence_classification, c)
        for family, c in _ENCODERS.items()
    ),
    *((family, AutoModelForMaskedLM, plain.causal_lm, c) for family, c in _ENCODERS.items()),
    *((family, AutoModelForTokenClassification, plain.token_classification, c) for family, c in _ENCODERS.items()),
    *((family, AutoModelForSeq2SeqLM, plain.sequence_to_sequence, _T5) for family in ("t5", "mt5", "umt5")),
    (
        "t5",
        AutoModelForSeq2SeqLM,
        plain.sequence_to_sequence,
        {**_T5, "is_gated_act": True, "dense_act_fn": "gelu_new"},
    ),
    *(
        (family, AutoModelForSeq2SeqLM, plain.sequence_to_sequence, _BART)
        for family in (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "m2m_100",
            "mbart",
            "mvp",
            "pegasus",
        )
    ),
    ("plbart", AutoModelForSeq2SeqLM, plain.sequence_to_sequence, _BART),
    ("marian", AutoModelForSeq2SeqLM, plain.sequence_to_sequence, {**_BART, "decoder_vocab_size": 67}),
    ("whisper", AutoModelForSpeechSeq2Seq, plain.speech_to_text, _WHISPER),
    ("vit", AutoModelForImageClassification, plain.image_classification, {"image_size": 32}),
    ("clip", CLIPModel, plain.image_text_pairs, {}),
    ("siglip", SiglipModel, plain.image_text_pairs, {}),
]
