"""Decoders: generative families."""

from dataclasses import replace
from typing import Any

from .blueprint import Block, Blueprint
from .fused import query_key_value

# The attention of LLaMA and of those that follow it
_LLAMA_ATTENTION = Block(column=("q_proj", "k_proj", "v_proj"), row=("o_proj",))
_LLAMA_MLP = Block(column=("gate_proj", "up_proj"), row=("down_proj",), dropout=())
# ... where gate and up are one matrix
_FUSED_MLP = Block(column=("gate_up_proj",), row=("down_proj",), parts={"gate_up_proj": 2}, dropout=())
_GPT_MLP = Block(column=("c_fc",), row=("c_proj",), dropout=())
# The MLP of GPT-NeoX and of those that follow it, and its attention: every head's query, key and value side by side
_NEOX_MLP = Block(column=("dense_h_to_4h",), row=("dense_4h_to_h",), dropout=())
# An MLP whose projections are children of the layer
_FLAT_MLP = Block(column=("fc1",), row=("fc2",), enter=("fc1",), leave=("fc2",), dropout=("activation_dropout",))
# Norms over all heads at once
_OLMO2 = Blueprint(
    layers="layers",
    blocks={
        "self_attn": replace(
            _LLAMA_ATTENTION, key_value={"k_proj": (), "v_proj": (), "k_norm": ()}, across=("q_norm", "k_norm")
        ),
        "mlp": _LLAMA_MLP,
    },
)
# A convolution of each channel by itself, between two gates
_SHORT_CONVOLUTION = Block(
    column=("in_proj",),
    row=("out_proj",),
    parts={"in_proj": 3},
    cut={"conv.weight": (0, 1), "conv.bias": (0, 1)},
    local_attributes=("conv.groups",),
    dropout=(),
)
_LFM_MLP = Block(column=("w1", "w3"), row=("w2",), dropout=())
_GATES = ("recurrent_param", "input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias")


def _one_key_value(config: Any) -> tuple[int, ...]:
    """All heads' queries, then one key and one value, where a config asks for multi-query attention."""
    if not config.multi_query or getattr(config, "new_decoder_architecture", False):
        return ()
    head_dim = config.hidden_size // config.num_attention_heads
    return config.hidden_size, head_dim, head_dim


DECODERS: dict[str, Blueprint] = {
    "apertus": Blueprint(
        layers="layers",
        blocks={
            "self_attn": replace(_LLAMA_ATTENTION, shared=("q_norm", "k_norm")),
            "mlp": Block(column=("up_proj",), row=("down_proj",), shared=("act_fn",), dropout=()),
        },
    ),
    "biogpt": Blueprint(
        layers="layers",
        blocks={
            "self_attn": Block(
                column=("q_proj", "k_proj", "v_proj"), row=("out_proj",), dropout=("attention_probs_dropout_prob",)
            ),
            "": _FLAT_MLP,
        },
    ),
    "bitnet": Blueprint(
        layers="layers",
        blocks={
            "self_attn": replace(_LLAMA_ATTENTION, across=("attn_sub_norm",)),
            "mlp": replace(_LLAMA_MLP, across=("ffn_sub_norm",)),
        },
    ),
    "bloom": Blueprint(
        layers="h",
        blocks={
            # both add the residual
            "self_attention": Block(
                column=("query_key_value",),
                row=("dense",),
                leave=("dense",),
                sample_heads=("alibi",),
                local_attributes=("num_heads",),
            ),
            "mlp": replace(_NEOX_MLP, leave=("dense_4h_to_h",)),
        },
        unfit=lambda config: (
            "slow_but_exact=True reads the weights of its projections itself"
            if config.slow_but_exact and config.pretraining_tp > 1
            else None
        ),
    ),
    "codegen": Blueprint(
        layers="h",
        blocks={
            # four groups of heads, and in each the queries, the values and the keys
            "attn": Block(
                column=("qkv_proj",),
                row=("out_proj",),
                parts={"qkv_proj": 12, "out_proj": 4},
                head_groups=4,
                local_attributes=("num_attention_heads",),
                dropout=("attn_pdrop",),
            ),
            "mlp": Block(column=("fc_in",), row=("fc_out",), dropout=()),
        },
    ),
    "ctrl": Blueprint(
        layers="h",
        blocks={
            # handed its input three times: as values, keys and queries
            "multi_head_attention": Block(
                column=("Wq", "Wk", "Wv"), row=("dense",), enter=("Wq", "Wk", "Wv"), dropout=()
            ),
            "ffn": Block(column=("0",), row=("2",), dropout=()),
        },
    ),
    "diffllama": Blueprint(
        layers="layers",
        blocks={
            # The difference is between the first half of the heads and the second.
            "self_attn": replace(
                _LLAMA_ATTENTION, parts={"q_proj": 2, "k_proj": 2, "v_proj": 2}, head_groups=2, shared=("",), dropout=()
            ),
            "mlp": _LLAMA_MLP,
        },
    ),
    "doge": Blueprint(
        layers="layers",
        blocks={
            "self_attn": replace(
                _LLAMA_ATTENTION,
                key_value={"k_proj": (), "v_proj": (), "A": (), "dt_proj": ()},
                shared=("q_norm", "k_norm"),
                across=("dt_proj",),
                own_heads=True,
            ),
            "mlp": _LLAMA_MLP,
        },
    ),
    "falcon": Blueprint(
        layers="h",
        blocks={
            # For every key/value head its queries, its key and its value; or, of multi-query attention, all queries.
            "self_attention": Block(
                column=("query_key_value",),
                row=("dense",),
                parts={"query_key_value": _one_key_value},
                key_value={"query_key_value": (1, 2)},
                local_attributes=("num_heads", "num_kv_heads"),
            ),
            "mlp": _NEOX_MLP,
        },
        unfit=lambda config: "alibi=True mixes its biases into the attention mask" if config.alibi else None,
    ),
    # The state-space mixer beside the attention stays whole.
    "falcon_h1": Blueprint(layers="layers", blocks={"self_attn": _LLAMA_ATTENTION, "feed_forward": _LLAMA_MLP}),
    "glm": Blueprint(layers="layers", blocks={"self_attn": _LLAMA_ATTENTION, "mlp": _FUSED_MLP}),
    "glm4": Blueprint(layers="layers", blocks={"self_attn": _LLAMA_ATTENTION, "mlp": _FUSED_MLP}),
    "gpt2": Blueprint(
        layers="h",
        blocks={
            "attn": Block(
                column=("c_attn",),
                row=("c_proj",),
                parts={"c_attn": 3},
                local_attributes=("split_size",),
                dropout=("attn_pdrop",),
            ),
            "mlp": _GPT_MLP,
        },
    ),
    "gpt_bigcode": Blueprint(
        layers="h",
        blocks={
            # every head's query, key and value side by side, or, of multi-query attention, as matrices of their own
            "attn": Block(
                column=("c_attn",),
                row=("c_proj",),
                parts={"c_attn": _one_key_value},
                key_value={"c_attn": (1, 2)},
                local_attributes=("num_heads", "embed_dim", "kv_dim"),
                dropout=("attn_pdrop",),
            ),
            "mlp": _GPT_MLP,
        },
    ),
    "gpt_neo": Blueprint(
        layers="h",
        blocks={
            "attn.attention": Block(
                column=("q_proj", "k_proj", "v_proj"), row=("out_proj",), local_attributes=("num_heads",)
            ),
            "mlp": _GPT_MLP,
        },
    ),
    "gpt_neox_japanese": Blueprint(
        layers="layers",
        blocks={
            # The bias of the output, `dense_bias`, only passes through: the layer adds it
            "attention": Block(
                column=("query_key_value",),
                row=("dense",),
                enter=("query_key_value",),
                local_attributes=("num_attention_heads",),
            ),
            "mlp": _NEOX_MLP,
        },
    ),
    "gptj": Blueprint(
        layers="h",
        blocks={
            "attn": Block(
                column=("q_proj", "k_proj", "v_proj"),
                row=("out_proj",),
                local_attributes=("num_attention_heads",),
                dropout=("attn_pdrop",),
            ),
            "mlp": Block(column=("fc_in",), row=("fc_out",), dropout=()),
        },
    ),
    "granite_swa": Blueprint(
        layers="layers", blocks={"self_attn": replace(_LLAMA_ATTENTION, own_heads=True), "mlp": _LLAMA_MLP}
    ),
    "modernbert-decoder": Blueprint(
        layers="layers",
        blocks={
            "attn": Block(column=("q_proj", "k_proj", "v_proj"), row=("Wo",)),
            "mlp": Block(column=("Wi",), row=("Wo",), parts={"Wi": 2}, dropout=("mlp_dropout",)),
        },
    ),
    "hunyuan_v1_dense": Blueprint(
        layers="layers",
        blocks={
            "self_attn": replace(_LLAMA_ATTENTION, shared=("query_layernorm", "key_layernorm")),
            "mlp": _LLAMA_MLP,
        },
    ),
    "lfm2": Blueprint(
        layers="layers",
        blocks={
            "self_attn": replace(
                _LLAMA_ATTENTION, row=("out_proj",), shared=("q_layernorm", "k_layernorm"), dropout=()
            ),
            "conv": _SHORT_CONVOLUTION,
            "feed_forward": _LFM_MLP,
        },
    ),
    "lfm3": Blueprint(
        layers="layers",
        blocks={
            "self_attn": Block(
                column=("q_proj", "k_proj", "v_proj", "g_proj"),
                row=("o_proj",),
                shared=("q_norm", "k_norm"),
                optional=True,  # the gate
            ),
            "conv": _SHORT_CONVOLUTION,
            "feed_forward": _LFM_MLP,
        },
    ),
    "mpt": Blueprint(
        layers="blocks",
        blocks={
            "attn": Block(
                column=("Wqkv",),
                row=("out_proj",),
                parts={"Wqkv": 3},
                heads={"position_bias": 0},
                local_attributes=("n_heads",),
                dropout=("attn_config.attn_pdrop",),
            ),
            # adds the residual
            "ffn": Block(column=("up_proj",), row=("down_proj",), leave=("down_proj",), dropout=()),
        },
    ),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "openai-gpt": Blueprint(
        layers="h",
        blocks={
            "attn": Block(
                column=("c_attn",),
                row=("c_proj",),
                leave=("resid_dropout",),  # the attention returns a list
                parts={"c_attn": 3},
                local_attributes=("n_head", "split_size"),
                dropout=("attn_pdrop",),
            ),
            "mlp": _GPT_MLP,
        },
    ),
    "opt": Blueprint(
        layers="decoder.layers",
        blocks={
            "self_attn": Block(
                column=("q_proj", "k_proj", "v_proj"), row=("out_proj",), local_attributes=("num_heads",)
            ),
            "": replace(_FLAT_MLP, dropout=()),
        },
    ),
    "persimmon": Blueprint(
        layers="layers",
        blocks={
            "self_attn": Block(
                column=("query_key_value",),
                row=("dense",),
                shared=("q_layernorm", "k_layernorm"),
                local_attributes=("num_heads",),
            ),
            "mlp": _NEOX_MLP,
        },
    ),
    "phi3": Blueprint(
        layers="layers",
        blocks={
            "self_attn": Block(
                column=("qkv_proj",),
                row=("o_proj",),
                parts={"qkv_proj": query_key_value},
                key_value={"qkv_proj": (1, 2)},
                local_attributes=("num_key_value_heads",),
                local_config=("num_attention_heads",),
            ),
            "mlp": _FUSED_MLP,
        },
    ),
    "recurrent_gemma": Blueprint(
        layers="layers",
        blocks={
            # attention in some layers, a gated linear recurrence with one gate per head in the others
            "temporal_block": Block(
                column=("q_proj", "k_proj", "v_proj", "linear_x", "linear_y"),
                row=("o_proj", "linear_out"),
                cut={
                    "conv_1d.weight": (0, 1),
                    "conv_1d.bias": (0, 1),
                    **{f"rg_lru.{name}": (0, 1) for name in _GATES},
                },
                local_attributes=("conv_1d.groups", "lru_width", "rg_lru.num_attention_heads"),
                optional=True,
            ),
            "mlp_block": _LLAMA_MLP,
        },
    ),
    "stablelm": Blueprint(
        layers="layers",
        blocks={
            "self_attn": replace(_LLAMA_ATTENTION, local_attributes=("num_heads", "num_key_value_heads")),
            "mlp": _LLAMA_MLP,
        },
    ),
    "xglm": Blueprint(
        layers="layers",
        blocks={
            "self_attn": Block(
                column=("q_proj", "k_proj", "v_proj"),
                row=("out_proj",),
                local_attributes=("embed_dim", "num_heads"),
            ),
            "": _FLAT_MLP,
        },
    ),
}
