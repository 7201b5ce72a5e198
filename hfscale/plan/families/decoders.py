"""Decoders: generative families."""

from dataclasses import replace

from ..blueprint import Block, Blueprint

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
