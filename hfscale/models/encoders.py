"""List blueprints (the names of layers, blocks, and column- and row-parallel projections) of encoders of text, images
or both, and of encoder-decoders. A class that has only the encoder or only the decoder uses the entry of the
encoder-decoder.
"""

from dataclasses import replace

from .blueprint import (
    FC_MLP,
    FLAT_MLP,
    LLAMA_ATTENTION,
    LLAMA_MLP,
    OUT_PROJ_ATTENTION,
    Block,
    Blueprint,
    in_layers,
    plain_mlp,
)

# BERT: residual and norm are inside `output`, after its dropout, so the block ends inside the attention module.
# The MLP consists of two children of the layer. If `output` has a dropout, the sum over ranks is computed at the
# dropout's output, since an adapter may wrap the projection before it.
_BERT_ATTENTION = Block(
    column=("self.query", "self.key", "self.value"),
    row=("output.dense",),
    enter=("self",),
    leave=("output.dropout",),
    local_attributes=("self.all_head_size",),
    dropout=("attention_probs_dropout_prob",),
)
_BERT_MLP = plain_mlp(
    "intermediate.dense", "output.dense", enter=("intermediate",), leave=("output.dropout",)
)
# BERT's MLP whose output has no dropout, or uses the same dropout again later
_BARE_MLP = replace(_BERT_MLP, leave=("output.dense",))
# BERT's MLP with a norm inside its first module
_NORM_INSIDE_MLP = replace(_BERT_MLP, shared=("intermediate.LayerNorm",))


def _bert(mlp: Block, attention: Block = _BERT_ATTENTION) -> Blueprint:
    return Blueprint(layers="encoder.layer", blocks={"attention": attention, "": mlp})


_BERT = _bert(_BERT_MLP)

# DeBERTa: every layer also reads one full table of relative positions, through projections per head. The attention
# applies dropout to this table, equally on all ranks, so only the attention weights' dropout may differ by rank.
_DEBERTA_ATTENTION = Block(
    column=(
        "self.query_proj",
        "self.key_proj",
        "self.value_proj",
        "self.pos_key_proj",
        "self.pos_query_proj",
    ),
    row=("output.dense",),
    optional=True,  # some kinds of relative positions have no projections
    enter=("self",),
    enter_inputs=("query_states", "rel_embeddings"),
    leave=("output.dropout",),
    local_attributes=("self.num_attention_heads",),
    dropout=("attention_probs_dropout_prob",),
    cut_from="self.dropout",
)
# The blocks of CLIP and of similar families
_CLIP_ATTENTION = replace(
    OUT_PROJ_ATTENTION,
    dropout=(
        "attention_dropout",
        "text_config.attention_dropout",
        "vision_config.attention_dropout",
    ),
)
_CLIP_BLOCKS = {"self_attn": _CLIP_ATTENTION, "mlp": FC_MLP}
_CLIP = Blueprint(
    layers=("text_model.encoder.layers", "vision_model.encoder.layers"), blocks=_CLIP_BLOCKS
)
_CLIP_TOWER = Blueprint(layers="encoder.layers", blocks=_CLIP_BLOCKS)
_VIT_ATTENTION = replace(LLAMA_ATTENTION, dropout=("attention_probs_dropout_prob",))

# XLM: attention modules and MLPs are two lists of the model, whose members alternate.
_XLM = Blueprint(
    layers=("attentions", "ffns"),
    blocks={
        "": Block(
            column=("q_lin", "k_lin", "v_lin", "lin1"),
            row=("out_lin", "lin2"),
            leave=("out_lin", "lin2"),
            optional=True,
            local_attributes=("n_heads",),
        )
    },
)
# MobileBERT: queries and keys read another bottleneck projection than values, and several MLPs follow each attention.
_MOBILEBERT = Blueprint(
    layers="encoder.layer",
    blocks={
        "attention": replace(
            _BERT_ATTENTION,
            enter=("self.query", "self.key", "self.value"),
            leave=("output.dense",),
            shared=(),
        ),
        **{f"ffn.{index}": _BARE_MLP for index in range(3)},
        "": _BARE_MLP,
    },
    unfit=lambda config: (
        None
        if config.num_feedforward_networks == 4
        else "other than 4 feedforward networks a layer"
    ),
)

ENCODERS: dict[str, Blueprint] = {
    # all layers are the same module, which the plan lists once
    "albert": Blueprint(
        layers="encoder.albert_layer_groups",
        blocks={
            # both blocks add the residual
            "albert_layers.0.attention": Block(
                column=("query", "key", "value"),
                row=("dense",),
                enter=("query", "key", "value"),
                leave=("output_dropout",),
                dropout=("attention_probs_dropout_prob",),
            ),
            "albert_layers.0": plain_mlp(
                "ffn", "ffn_output", enter=("ffn",), leave=("ffn_output",)
            ),
        },
        unfit=lambda config: (
            "inner_group_num > 1 has several layers in one" if config.inner_group_num > 1 else None
        ),
    ),
    **dict.fromkeys(
        ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "markuplm"),
        _BERT,
    ),
    **dict.fromkeys(("megatron-bert", "rembert", "roberta", "roc_bert", "xlm-roberta"), _BERT),
    # the positions are parameters, which every layer reads for rotary embeddings
    "roformer": _bert(_BERT_MLP, replace(_BERT_ATTENTION, enter_inputs=("sinusoidal_pos",))),
    **dict.fromkeys(("xlm-roberta-xl", "xmod"), _bert(_BARE_MLP)),
    "roberta-prelayernorm": _bert(_NORM_INSIDE_MLP),
    # the model replaces its attention modules if sequences are short, so they are not sharded
    "big_bird": Blueprint(layers="encoder.layer", blocks={"": _BERT_MLP}),
    **dict.fromkeys(("clip", "siglip"), _CLIP),
    **dict.fromkeys(
        ("clip_text_model", "clip_vision_model", "siglip_text_model", "siglip_vision_model"),
        _CLIP_TOWER,
    ),
    "deberta-v2": _bert(_BERT_MLP, _DEBERTA_ATTENTION),
    "distilbert": in_layers(
        "transformer.layer",
        attention=Block(column=("q_lin", "k_lin", "v_lin"), row=("out_lin",)),
        ffn=plain_mlp("lin1", "lin2"),
    ),
    "mobilebert": _MOBILEBERT,
    "vit": in_layers("layers", attention=_VIT_ATTENTION, mlp=FC_MLP),
    **dict.fromkeys(("flaubert", "xlm"), _XLM),
}

# BART: the MLP's projections are children of the layer. In the cross-attention, keys and values read the encoder's
# output, which enters the block in addition to the decoder's hidden states.
_BART_ATTENTION = replace(OUT_PROJ_ATTENTION, local_attributes=("num_heads", "embed_dim"))
_BART_CROSS_ATTENTION = replace(_BART_ATTENTION, enter_inputs=("key_value_states",), optional=True)
_BART_BLOCKS = {"self_attn": _BART_ATTENTION, "encoder_attn": _BART_CROSS_ATTENTION, "": FLAT_MLP}
_BART = Blueprint(layers=("encoder.layers", "decoder.layers"), blocks=_BART_BLOCKS)

# T5: the first layer of each stack has a bias per head and relative position. It computes the biases of its rank's
# heads and passes them to all later layers.
_T5_ATTENTION = Block(
    column=("q", "k", "v"),
    row=("o",),
    cut={"relative_attention_bias.weight": (1, 1)},
    local_attributes=("n_heads", "inner_dim"),
    dropout=("dropout_rate",),
)
# T5's MLP, gated or not
_T5_MLP = Block(
    column=("wi", "wi_0", "wi_1"), row=("wo",), optional=True, dropout=("dropout_rate",)
)
_T5 = Blueprint(
    layers=("encoder.block", "decoder.block"),
    blocks={
        "layer.0.SelfAttention": _T5_ATTENTION,
        "layer.1.EncDecAttention": replace(
            _T5_ATTENTION, enter_inputs=("key_value_states", "encoder_hidden_states")
        ),
        "layer.1.DenseReluDense": _T5_MLP,  # in the encoder
        "layer.2.DenseReluDense": _T5_MLP,  # in the decoder
    },
)

# T5Gemma: Gemma's layers in two stacks, each with its own config.
_T5GEMMA = Blueprint(
    layers=("encoder.layers", "decoder.layers"),
    blocks={
        "self_attn": LLAMA_ATTENTION,
        "cross_attn": replace(
            LLAMA_ATTENTION, enter_inputs=("encoder_hidden_states",), optional=True
        ),
        "mlp": replace(LLAMA_MLP, dropout=("dropout_rate",)),
    },
    config_of=lambda config: getattr(config, "encoder", config),
)

ENCODER_DECODERS: dict[str, Blueprint] = {
    **dict.fromkeys(
        ("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp"), _BART
    ),
    **dict.fromkeys(("pegasus", "plbart", "whisper"), _BART),
    # the encoder has block-sparse attention, so it is not sharded
    "bigbird_pegasus": Blueprint(layers="decoder.layers", blocks=_BART_BLOCKS),
    "moshi": in_layers(
        "layers",
        self_attn=Block(
            column=("q_proj.linear", "k_proj.linear", "v_proj.linear"), row=("o_proj.linear",)
        ),
        mlp=replace(FC_MLP, parts={"fc1": 2}),  # gate and up in one
    ),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    # trocr: attention derives the total width of heads from the width of its input, so only the MLP is sharded
    "t5gemma": _T5GEMMA,
    "trocr": Blueprint(layers="decoder.layers", blocks={"": FLAT_MLP}),
}
