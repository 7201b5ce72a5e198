"""List blueprints (the names of layers, blocks, and column- and row-parallel projections) of decoders like GPT, with an
MLP of two projections, and often fused queries, keys and values.
"""

from dataclasses import replace
from typing import Any

from .blueprint import FLAT_MLP, OUT_PROJ_ATTENTION, Block, Blueprint, in_layers, plain_mlp

# GPT-2's attention and MLP, and the MLP of GPT-J
_GPT_ATTENTION = Block(column=("c_attn",), row=("c_proj",), dropout=("attn_pdrop",))
_GPT_MLP = plain_mlp("c_fc", "c_proj")
_GPTJ_MLP = plain_mlp("fc_in", "fc_out")
# The attention of GPT-NeoX, every head's query, key and value side by side, and its MLP
_NEOX_ATTENTION = Block(column=("query_key_value",), row=("dense",))
_NEOX_MLP = plain_mlp("dense_h_to_4h", "dense_4h_to_h")


def _flat(layers: str, mlp: Block = FLAT_MLP, **attention: Any) -> Blueprint:
    return Blueprint(layers, {"self_attn": replace(OUT_PROJ_ATTENTION, **attention), "": mlp})


def _one_key_value(config: Any) -> tuple[int, ...]:
    """Return the widths of all queries, one key and one value if the config has multi-query attention; else ``()``."""
    if not config.multi_query or getattr(config, "new_decoder_architecture", False):
        return ()
    head_dim = config.hidden_size // config.num_attention_heads
    return config.hidden_size, head_dim, head_dim


GPT_DECODERS: dict[str, Blueprint] = {
    "biogpt": _flat("layers", dropout=("attention_probs_dropout_prob",)),
    "bloom": in_layers(
        "h",
        # both blocks add the residual
        self_attention=replace(
            _NEOX_ATTENTION,
            leave=("dense",),
            sample_heads=("alibi",),
            local_attributes=("num_heads",),
        ),
        mlp=replace(_NEOX_MLP, leave=("dense_4h_to_h",)),
        unfit=lambda config: (
            "slow_but_exact=True reads the weights of its projections itself"
            if config.slow_but_exact and config.pretraining_tp > 1
            else None
        ),
    ),
    "codegen": in_layers(
        "h",
        # four groups of heads; each group has its queries, values and keys side by side
        attn=Block(
            column=("qkv_proj",),
            row=("out_proj",),
            parts={"qkv_proj": 12, "out_proj": 4},
            head_groups=4,
            # transformers up to 5.23 reads the first attribute, transformers from 5.24 on the second
            local_attributes=("num_attention_heads", "embed_dim"),
            dropout=("attn_pdrop",),
        ),
        mlp=_GPTJ_MLP,
    ),
    "ctrl": in_layers(
        "h",
        # the module receives its input three times: for values, keys and queries
        multi_head_attention=Block(
            column=("Wq", "Wk", "Wv"), row=("dense",), enter=("Wq", "Wk", "Wv"), dropout=()
        ),
        ffn=plain_mlp("0", "2"),
    ),
    "falcon": in_layers(
        "h",
        # The matrices lie side by side: for every key/value head its queries, key and value; with multi-query
        # attention, all queries, then one key and one value.
        self_attention=replace(
            _NEOX_ATTENTION,
            parts={"query_key_value": _one_key_value},
            key_value={"query_key_value": (1, 2)},
            local_attributes=("num_heads", "num_kv_heads"),
        ),
        mlp=_NEOX_MLP,
        unfit=lambda config: (
            "alibi=True mixes its biases into the attention mask" if config.alibi else None
        ),
    ),
    "gpt2": in_layers(
        "h",
        attn=replace(_GPT_ATTENTION, parts={"c_attn": 3}, local_attributes=("split_size",)),
        mlp=_GPT_MLP,
    ),
    "gpt_bigcode": in_layers(
        "h",
        # every head's query, key and value side by side; with multi-query attention, all queries, then key and value
        attn=replace(
            _GPT_ATTENTION,
            parts={"c_attn": _one_key_value},
            key_value={"c_attn": (1, 2)},
            local_attributes=("num_heads", "embed_dim", "kv_dim"),
        ),
        mlp=_GPT_MLP,
    ),
    "gpt_neo": Blueprint(
        layers="h",
        blocks={
            "attn.attention": replace(OUT_PROJ_ATTENTION, local_attributes=("num_heads",)),
            "mlp": _GPT_MLP,
        },
    ),
    "gpt_neox_japanese": in_layers(
        "layers",
        # The block returns the output's bias, `dense_bias`, unchanged; the layer adds it.
        attention=replace(
            _NEOX_ATTENTION, enter=("query_key_value",), local_attributes=("num_attention_heads",)
        ),
        mlp=_NEOX_MLP,
    ),
    "gptj": in_layers(
        "h",
        attn=replace(
            OUT_PROJ_ATTENTION, local_attributes=("num_attention_heads",), dropout=("attn_pdrop",)
        ),
        mlp=_GPTJ_MLP,
    ),
    "mpt": in_layers(
        "blocks",
        attn=Block(
            column=("Wqkv",),
            row=("out_proj",),
            parts={"Wqkv": 3},
            heads={"position_bias": 0},
            local_attributes=("n_heads",),
            dropout=("attn_config.attn_pdrop",),
        ),
        # the block adds the residual
        ffn=plain_mlp("up_proj", "down_proj", leave=("down_proj",)),
    ),
    "openai-gpt": in_layers(
        "h",
        attn=replace(
            _GPT_ATTENTION,
            leave=("resid_dropout",),  # the attention returns a list
            parts={"c_attn": 3},
            local_attributes=("n_head", "split_size"),
        ),
        mlp=_GPT_MLP,
    ),
    "opt": _flat("decoder.layers", replace(FLAT_MLP, dropout=()), local_attributes=("num_heads",)),
    "persimmon": in_layers(
        "layers",
        self_attn=replace(
            _NEOX_ATTENTION, shared=("q_layernorm", "k_layernorm"), local_attributes=("num_heads",)
        ),
        mlp=_NEOX_MLP,
    ),
    "xglm": _flat("layers", local_attributes=("embed_dim", "num_heads")),
}
