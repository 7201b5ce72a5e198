"""List blueprints of decoders like LLaMA: separate queries, keys and values; a gated MLP, or a mixture of experts."""

from dataclasses import replace
from typing import Any

from .blueprint import Block, Blueprint, in_layers
from .family_limits import UNWRITABLE
from .fields import query_key_value

# The attention of LLaMA and of those that follow it
_LLAMA_ATTENTION = Block(column=("q_proj", "k_proj", "v_proj"), row=("o_proj",))
# ... where some layers read the keys and values of others, of the same heads
_GEMMA_ATTENTION = replace(_LLAMA_ATTENTION, shared=("q_norm", "k_norm"), optional=True)
_LLAMA_MLP = Block(column=("gate_proj", "up_proj"), row=("down_proj",), dropout=())
# ... where gate and up are one matrix
_FUSED_MLP = Block(column=("gate_up_proj",), row=("down_proj",), parts={"gate_up_proj": 2}, dropout=())
# Norms over all heads at once
_OLMO2 = in_layers(
    "layers",
    self_attn=replace(
        _LLAMA_ATTENTION, key_value={"k_proj": (), "v_proj": (), "k_norm": ()}, across=("q_norm", "k_norm")
    ),
    mlp=_LLAMA_MLP,
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
_MLLAMA_ATTENTION = replace(
    _LLAMA_ATTENTION, local_attributes=("num_heads", "num_key_value_heads"), dropout=("dropout",)
)
_LFM_MLP = Block(column=("w1", "w3"), row=("w2",), dropout=())
_GATES = ("recurrent_param", "input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias")
# One matrix per expert: [experts, out, in], or the other way round.
_EXPERTS = {"experts.gate_up_proj": (1, 2), "experts.down_proj": (2, 1)}
_EXPERTS_TRANSPOSED = {"experts.gate_up_proj": (2, 2), "experts.down_proj": (1, 1)}


def _mixture(shared_expert: str, experts: dict[str, tuple[int, int]], **changes: Any) -> Block:
    """Return the block of a mixture, or of the dense MLP that some layers have instead; the router is not cut."""
    return Block(
        column=("gate_proj", "up_proj", f"{shared_expert}.gate_proj", f"{shared_expert}.up_proj"),
        row=("down_proj", f"{shared_expert}.down_proj"),
        cut=experts,
        rest_shared=True,
        optional=True,
        dropout=(),
        **changes,
    )


DECODERS: dict[str, Blueprint] = {
    "apertus": in_layers(
        "layers",
        self_attn=replace(_LLAMA_ATTENTION, shared=("q_norm", "k_norm")),
        mlp=Block(column=("up_proj",), row=("down_proj",), shared=("act_fn",), dropout=()),
    ),
    "bitnet": in_layers(
        "layers",
        self_attn=replace(_LLAMA_ATTENTION, across=("attn_sub_norm",)),
        mlp=replace(_LLAMA_MLP, across=("ffn_sub_norm",)),
    ),
    "diffllama": in_layers(
        "layers",
        # The difference is between the first half of the heads and the second.
        self_attn=replace(
            _LLAMA_ATTENTION, parts={"q_proj": 2, "k_proj": 2, "v_proj": 2}, head_groups=2, shared=("",), dropout=()
        ),
        mlp=_LLAMA_MLP,
    ),
    "doge": in_layers(
        "layers",
        self_attn=replace(
            _LLAMA_ATTENTION,
            key_value={"k_proj": (), "v_proj": (), "A": (), "dt_proj": ()},
            shared=("q_norm", "k_norm"),
            across=("dt_proj",),
            own_heads=True,
        ),
        mlp=_LLAMA_MLP,
    ),
    # The state-space mixer beside the attention stays whole.
    "falcon_h1": in_layers("layers", self_attn=_LLAMA_ATTENTION, feed_forward=_LLAMA_MLP),
    # The MLP stays whole: some layers keep those of its numbers that stand out of their row.
    "gemma3n_text": in_layers("layers", self_attn=_GEMMA_ATTENTION),
    "glm": in_layers("layers", self_attn=_LLAMA_ATTENTION, mlp=_FUSED_MLP),
    "glm4": in_layers("layers", self_attn=_LLAMA_ATTENTION, mlp=_FUSED_MLP),
    "granite_swa": in_layers("layers", self_attn=replace(_LLAMA_ATTENTION, own_heads=True), mlp=_LLAMA_MLP),
    "mllama_text_model": in_layers(
        "layers",
        # some layers read the picture, and nothing of the text but what asks
        self_attn=replace(_MLLAMA_ATTENTION, optional=True),
        cross_attn=replace(
            _MLLAMA_ATTENTION, shared=("q_norm", "k_norm"), enter_inputs=("cross_attention_states",), optional=True
        ),
        mlp=_LLAMA_MLP,
    ),
    "modernbert-decoder": in_layers(
        "layers",
        attn=Block(column=("q_proj", "k_proj", "v_proj"), row=("Wo",)),
        mlp=Block(column=("Wi",), row=("Wo",), parts={"Wi": 2}, dropout=("mlp_dropout",)),
    ),
    "hunyuan_v1_dense": in_layers(
        "layers", self_attn=replace(_LLAMA_ATTENTION, shared=("query_layernorm", "key_layernorm")), mlp=_LLAMA_MLP
    ),
    "lfm2": in_layers(
        "layers",
        self_attn=replace(_LLAMA_ATTENTION, row=("out_proj",), shared=("q_layernorm", "k_layernorm"), dropout=()),
        conv=_SHORT_CONVOLUTION,
        feed_forward=_LFM_MLP,
    ),
    "lfm3": in_layers(
        "layers",
        self_attn=Block(
            column=("q_proj", "k_proj", "v_proj", "g_proj"),
            row=("o_proj",),
            shared=("q_norm", "k_norm"),
            optional=True,  # the gate
        ),
        conv=_SHORT_CONVOLUTION,
        feed_forward=_LFM_MLP,
    ),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "phi3": in_layers(
        "layers",
        self_attn=Block(
            column=("qkv_proj",),
            row=("o_proj",),
            parts={"qkv_proj": query_key_value},
            key_value={"qkv_proj": (1, 2)},
            local_attributes=("num_key_value_heads",),
            local_config=("num_attention_heads",),
        ),
        mlp=_FUSED_MLP,
    ),
    "recurrent_gemma": in_layers(
        "layers",
        # attention in some layers, a gated linear recurrence with one gate per head in the others
        temporal_block=Block(
            column=("q_proj", "k_proj", "v_proj", "linear_x", "linear_y"),
            row=("o_proj", "linear_out"),
            cut={"conv_1d.weight": (0, 1), "conv_1d.bias": (0, 1), **{f"rg_lru.{name}": (0, 1) for name in _GATES}},
            local_attributes=("conv_1d.groups", "lru_width", "rg_lru.num_attention_heads"),
            optional=True,
        ),
        mlp_block=_LLAMA_MLP,
    ),
    "stablelm": in_layers(
        "layers",
        self_attn=replace(_LLAMA_ATTENTION, local_attributes=("num_heads", "num_key_value_heads")),
        mlp=_LLAMA_MLP,
    ),
    # Mixtures of experts, latent attention and kinds of layers that transformers' plan does not cover.
    # The norm behind the mixture reads what is summed. The attention stays whole, as in the host's plan.
    "axk1": in_layers(
        "layers",
        mlp=_mixture("shared_experts", _EXPERTS, leave=("experts", "shared_experts"), outside=("post_mlp_layernorm",)),
    ),
    "gemma4_text": in_layers(
        "layers",
        self_attn=_GEMMA_ATTENTION,
        mlp=_LLAMA_MLP,
        unfit=lambda config: "enable_moe_block has a router beside its experts" if config.enable_moe_block else None,
    ),
    "gpt_oss": in_layers(
        "layers",
        self_attn=replace(_LLAMA_ATTENTION, own_heads=True),
        mlp=Block(
            column=(),
            row=(),
            # gate and up interleaved
            cut={"experts.gate_up_proj": (2, 1), "experts.gate_up_proj_bias": (1, 1), "experts.down_proj": (1, 1)},
            pairs=("experts.gate_up_proj", "experts.gate_up_proj_bias"),
            once=("experts.down_proj_bias",),
            rest_shared=True,
            dropout=(),
        ),
    ),
    "hrm_text": Blueprint(
        layers=("L_module.layers", "H_module.layers"),
        blocks={
            "self_attn": replace(_LLAMA_ATTENTION, column=("q_proj", "k_proj", "v_proj", "gate_proj")),
            "mlp": _LLAMA_MLP,
        },
        unfit=lambda config: UNWRITABLE["hrm_text"],
    ),
    "llama4_text": in_layers(
        "layers", self_attn=_LLAMA_ATTENTION, feed_forward=_mixture("shared_expert", _EXPERTS_TRANSPOSED)
    ),
    # Queries are of low rank where a config asks for it, keys and values always.
    "minicpm3": in_layers(
        "layers",
        self_attn=Block(
            column=("q_proj", "q_b_proj", "kv_b_proj"),
            row=("o_proj",),
            shared=("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
            optional=True,
        ),
        mlp=_LLAMA_MLP,
    ),
    # A layer is one mixer: attention, an MLP, a mixture, or a state-space mixer, which stays whole.
    "nemotron_h": in_layers(
        "layers",
        mixer=Block(
            column=("q_proj", "k_proj", "v_proj", "up_proj", "shared_experts.up_proj"),
            row=("o_proj", "down_proj", "shared_experts.down_proj"),
            cut={"experts.up_proj": (1, 1), "experts.down_proj": (2, 1)},
            rest_shared=True,
            optional=True,
        ),
    ),
    # The host's plan in transformers 5.17 describes its dense layers only.
    "qwen2_moe": in_layers("layers", self_attn=_LLAMA_ATTENTION, mlp=_mixture("shared_expert", _EXPERTS)),
}
