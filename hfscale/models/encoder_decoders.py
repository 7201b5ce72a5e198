"""Blueprints of encoder-decoders: a class with one of the two layer lists uses the same entry."""

from dataclasses import replace

from .blueprint import Block, Blueprint, in_layers

# BART's shape: the MLP's projections are children of the layer. In the attention to the encoder, keys and values read
# the encoder's output, which enters besides the decoder's stream.
_BART_ATTENTION = Block(
    column=("q_proj", "k_proj", "v_proj"), row=("out_proj",), local_attributes=("num_heads", "embed_dim")
)
_BART_CROSS_ATTENTION = replace(_BART_ATTENTION, enter_inputs=("key_value_states",), optional=True)
_BART_MLP = Block(column=("fc1",), row=("fc2",), enter=("fc1",), leave=("fc2",), dropout=("activation_dropout",))
_BART_BLOCKS = {"self_attn": _BART_ATTENTION, "encoder_attn": _BART_CROSS_ATTENTION, "": _BART_MLP}
_BART = Blueprint(layers=("encoder.layers", "decoder.layers"), blocks=_BART_BLOCKS)

# T5's shape. The first layer of each stack has a bias per head and relative position and hands what it makes of it, for
# the heads of its rank, to the other layers.
_T5_ATTENTION = Block(
    column=("q", "k", "v"),
    row=("o",),
    cut={"relative_attention_bias.weight": (1, 1)},
    local_attributes=("n_heads", "inner_dim"),
    dropout=("dropout_rate",),
)
_T5_MLP = Block(column=("wi", "wi_0", "wi_1"), row=("wo",), optional=True, dropout=("dropout_rate",))  # gated or not
_T5 = Blueprint(
    layers=("encoder.block", "decoder.block"),
    blocks={
        "layer.0.SelfAttention": _T5_ATTENTION,
        "layer.1.EncDecAttention": replace(_T5_ATTENTION, enter_inputs=("key_value_states", "encoder_hidden_states")),
        "layer.1.DenseReluDense": _T5_MLP,  # in the encoder
        "layer.2.DenseReluDense": _T5_MLP,  # in the decoder
    },
)

# Gemma's layers in two stacks, each with a config of its own.
_T5GEMMA_ATTENTION = Block(column=("q_proj", "k_proj", "v_proj"), row=("o_proj",))
_T5GEMMA = Blueprint(
    layers=("encoder.layers", "decoder.layers"),
    blocks={
        "self_attn": _T5GEMMA_ATTENTION,
        "cross_attn": replace(_T5GEMMA_ATTENTION, enter_inputs=("encoder_hidden_states",), optional=True),
        "mlp": Block(column=("gate_proj", "up_proj"), row=("down_proj",), dropout=("dropout_rate",)),
    },
    config_of=lambda config: getattr(config, "encoder", config),
)

ENCODER_DECODERS: dict[str, Blueprint] = {
    "bart": _BART,
    # its encoder's attention is of blocks, so the encoder stays whole
    "bigbird_pegasus": Blueprint(layers="decoder.layers", blocks=_BART_BLOCKS),
    "blenderbot": _BART,
    "blenderbot-small": _BART,
    "m2m_100": _BART,
    "marian": _BART,
    "mbart": _BART,
    "moshi": in_layers(
        "layers",
        self_attn=Block(column=("q_proj.linear", "k_proj.linear", "v_proj.linear"), row=("o_proj.linear",)),
        mlp=Block(column=("fc1",), row=("fc2",), parts={"fc1": 2}, dropout=()),  # gate and up in one
    ),
    "mt5": _T5,
    "mvp": _BART,
    "pegasus": _BART,
    "plbart": _BART,
    "t5": _T5,
    # its attention reads the width of its heads together off its input, so it stays whole
    "t5gemma": _T5GEMMA,
    "trocr": Blueprint(layers="decoder.layers", blocks={"": _BART_MLP}),
    "umt5": _T5,
    "whisper": _BART,
}
