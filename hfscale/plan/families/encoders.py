"""Encoders, and the decoder halves of encoder-decoders."""

from dataclasses import replace

from ..blueprint import Block, Blueprint

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

# BART's decoder: the MLP's projections are children of the layer. Attention to an encoder stays whole: its keys and
# values read the encoder's output, its queries the decoder's.
_BART_ATTENTION = Block(
    column=("q_proj", "k_proj", "v_proj"), row=("out_proj",), local_attributes=("num_heads", "embed_dim")
)
_BART_MLP = Block(column=("fc1",), row=("fc2",), enter=("fc1",), leave=("fc2",), dropout=("activation_dropout",))
_BART = Blueprint(layers="decoder.layers", blocks={"self_attn": _BART_ATTENTION, "": _BART_MLP})

ENCODERS: dict[str, Blueprint] = {
    "bart": _BART,
    "bert": _BERT,
    "bert-generation": _BERT,
    # its attention replaces itself where sequences are short, so it stays whole
    "big_bird": Blueprint(layers="encoder.layer", blocks={"": _BERT_MLP}),
    "bigbird_pegasus": _BART,
    "blenderbot": _BART,
    "blenderbot-small": _BART,
    "camembert": _BERT,
    "data2vec-text": _BERT,
    "electra": _BERT,
    "ernie": _BERT,
    "marian": _BART,
    "mbart": _BART,
    "megatron-bert": _BERT,
    "moshi": Blueprint(
        layers="layers",
        blocks={
            "self_attn": Block(
                column=("q_proj.linear", "k_proj.linear", "v_proj.linear"),
                row=("o_proj.linear",),
            ),
            "mlp": Block(column=("fc1",), row=("fc2",), parts={"fc1": 2}, dropout=()),  # gate and up in one
        },
    ),
    "mvp": _BART,
    "pegasus": _BART,
    "plbart": _BART,
    "rembert": _BERT,
    "roberta": _BERT,
    "roberta-prelayernorm": _BERT_NORM_INSIDE,
    "roc_bert": _BERT,
    "roformer": _BERT,
    # its attention reads the width of its heads together off its input, so it stays whole
    "trocr": Blueprint(layers="decoder.layers", blocks={"": _BART_MLP}),
    "whisper": _BART,
    "xlm-roberta": _BERT,
    "xlm-roberta-xl": _BERT_BARE,
    "xmod": _BERT_BARE,
}
