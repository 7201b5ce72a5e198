"""List blueprints of encoders: for text, for images, and for both side by side."""

from dataclasses import replace

from .blueprint import Block, Blueprint, in_layers

# BERT's shape: residual and norm are inside `output`, behind its dropout, so the edges are inside the attention, and
# the MLP is two siblings in the layer. Where `output` has a dropout, that is what completes the sum: it comes behind
# whatever an adapter puts around the projection.
_BERT_ATTENTION = Block(
    column=("self.query", "self.key", "self.value"),
    row=("output.dense",),
    enter=("self",),
    leave=("output.dropout",),
    local_attributes=("self.all_head_size",),
    dropout=("attention_probs_dropout_prob",),
)
_BERT_MLP = Block(
    column=("intermediate.dense",),
    row=("output.dense",),
    enter=("intermediate",),
    leave=("output.dropout",),
    dropout=(),
)
_BERT = Blueprint(layers="encoder.layer", blocks={"attention": _BERT_ATTENTION, "": _BERT_MLP})
# ... where the MLP's output has no dropout of its own, or uses it again later
_BERT_BARE = Blueprint(
    layers="encoder.layer", blocks={"attention": _BERT_ATTENTION, "": replace(_BERT_MLP, leave=("output.dense",))}
)
# ... where the norm in front of the MLP is inside its first part
_BERT_NORM_INSIDE = Blueprint(
    layers="encoder.layer",
    blocks={"attention": _BERT_ATTENTION, "": replace(_BERT_MLP, shared=("intermediate.LayerNorm",))},
)

# DeBERTa: every layer also reads one table of relative positions, whole, and its heads read it through projections of
# their own. That table has a dropout inside the attention, so only the attention weights' dropout may differ by rank.
_DEBERTA_ATTENTION = Block(
    column=("self.query_proj", "self.key_proj", "self.value_proj", "self.pos_key_proj", "self.pos_query_proj"),
    row=("output.dense",),
    optional=True,  # some kinds of positions have no projections
    enter=("self",),
    enter_inputs=("query_states", "rel_embeddings"),
    leave=("output.dropout",),
    local_attributes=("self.num_attention_heads",),
    dropout=("attention_probs_dropout_prob",),
    cut_from="self.dropout",
)
# The blocks of CLIP and of those that follow it
_CLIP_ATTENTION = Block(
    column=("q_proj", "k_proj", "v_proj"),
    row=("out_proj",),
    dropout=("attention_dropout", "text_config.attention_dropout", "vision_config.attention_dropout"),
)
_FC_MLP = Block(column=("fc1",), row=("fc2",), dropout=())
_CLIP_BLOCKS = {"self_attn": _CLIP_ATTENTION, "mlp": _FC_MLP}
_CLIP = Blueprint(layers=("text_model.encoder.layers", "vision_model.encoder.layers"), blocks=_CLIP_BLOCKS)
_CLIP_TOWER = Blueprint(layers="encoder.layers", blocks=_CLIP_BLOCKS)
_VIT_ATTENTION = Block(
    column=("q_proj", "k_proj", "v_proj"), row=("o_proj",), dropout=("attention_probs_dropout_prob",)
)

# XLM: attentions and MLPs are two lists of one model, whose modules take turns.
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
# MobileBERT: queries and keys read another bottleneck than values, and several MLPs follow each attention.
_MOBILE_MLP = replace(_BERT_MLP, leave=("output.dense",))
_MOBILEBERT = Blueprint(
    layers="encoder.layer",
    blocks={
        "attention": replace(
            _BERT_ATTENTION, enter=("self.query", "self.key", "self.value"), leave=("output.dense",), shared=()
        ),
        **{f"ffn.{index}": _MOBILE_MLP for index in range(3)},
        "": _MOBILE_MLP,
    },
    unfit=lambda config: None if config.num_feedforward_networks == 4 else "other than 4 feedforward networks a layer",
)

ENCODERS: dict[str, Blueprint] = {
    # every layer is the same one, which the plan lists once
    "albert": Blueprint(
        layers="encoder.albert_layer_groups",
        blocks={
            # both add the residual
            "albert_layers.0.attention": Block(
                column=("query", "key", "value"),
                row=("dense",),
                enter=("query", "key", "value"),
                leave=("output_dropout",),
                dropout=("attention_probs_dropout_prob",),
            ),
            "albert_layers.0": Block(
                column=("ffn",), row=("ffn_output",), enter=("ffn",), leave=("ffn_output",), dropout=()
            ),
        },
        unfit=lambda config: "inner_group_num > 1 has several layers in one" if config.inner_group_num > 1 else None,
    ),
    "bert": _BERT,
    "bert-generation": _BERT,
    # its attention replaces itself where sequences are short, so it stays whole
    "big_bird": Blueprint(layers="encoder.layer", blocks={"": _BERT_MLP}),
    "camembert": _BERT,
    "clip": _CLIP,
    "clip_text_model": _CLIP_TOWER,
    "clip_vision_model": _CLIP_TOWER,
    "data2vec-text": _BERT,
    "deberta-v2": Blueprint(layers="encoder.layer", blocks={"attention": _DEBERTA_ATTENTION, "": _BERT_MLP}),
    "distilbert": in_layers(
        "transformer.layer",
        attention=Block(column=("q_lin", "k_lin", "v_lin"), row=("out_lin",)),
        ffn=Block(column=("lin1",), row=("lin2",), dropout=()),
    ),
    "electra": _BERT,
    "ernie": _BERT,
    "flaubert": _XLM,
    "markuplm": _BERT,
    "megatron-bert": _BERT,
    "mobilebert": _MOBILEBERT,
    "rembert": _BERT,
    "roberta": _BERT,
    "roberta-prelayernorm": _BERT_NORM_INSIDE,
    "roc_bert": _BERT,
    "roformer": _BERT,
    "siglip": _CLIP,
    "siglip_text_model": _CLIP_TOWER,
    "siglip_vision_model": _CLIP_TOWER,
    "vit": in_layers("layers", attention=_VIT_ATTENTION, mlp=_FC_MLP),
    "xlm": _XLM,
    "xlm-roberta": _BERT,
    "xlm-roberta-xl": _BERT_BARE,
    "xmod": _BERT_BARE,
}
