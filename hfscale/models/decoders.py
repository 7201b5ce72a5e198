"""List blueprints (the names of layers, blocks, and column- and row-parallel projections) of decoders like LLaMA, with
separate queries, keys and values, and a gated MLP or experts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .blueprint import LLAMA_ATTENTION, LLAMA_MLP, Block, Blueprint, in_layers, plain_mlp
from .family_limits import UNWRITABLE
from .fields import query_key_value

# LLaMA's attention with norms of queries and keys, for families in which some layers read other layers' keys and values
_GEMMA_ATTENTION = replace(LLAMA_ATTENTION, shared=("q_norm", "k_norm"), optional=True)
# LLaMA's MLP with gate and up fused in one matrix
_FUSED_MLP = plain_mlp("gate_up_proj", "down_proj", parts={"gate_up_proj": 2})
# A depthwise convolution between two gates
_SHORT_CONVOLUTION = Block(
    column=("in_proj",),
    row=("out_proj",),
    parts={"in_proj": 3},
    cut={"conv.weight": (0, 1), "conv.bias": (0, 1)},
    local_attributes=("conv.groups",),
    dropout=(),
)
_MLLAMA_ATTENTION = replace(
    LLAMA_ATTENTION, local_attributes=("num_heads", "num_key_value_heads"), dropout=("dropout",)
)
_LFM_MLP = Block(column=("w1", "w3"), row=("w2",), dropout=())
_GATES = (
    "recurrent_param",
    "input_gate_weight",
    "input_gate_bias",
    "recurrent_gate_weight",
    "recurrent_gate_bias",
)
# One matrix per expert: [experts, out, in], or the other way round.
_EXPERTS = {"experts.gate_up_proj": (1, 2), "experts.down_proj": (2, 1)}
_EXPERTS_TRANSPOSED = {"experts.gate_up_proj": (2, 2), "experts.down_proj": (1, 1)}


def _llama(
    mlp: Block = LLAMA_MLP,
    unfit: Callable[[Any], str | None] = Blueprint.unfit,
    **attention: Any,
) -> Blueprint:
    """Return the blueprint of layers like LLaMA's. ``attention`` are fields of :class:`Block` in which their attention
    differs from LLaMA's.
    """
    return in_layers("layers", unfit, self_attn=replace(LLAMA_ATTENTION, **attention), mlp=mlp)


def _mixture(
    shared_expert: str,
    experts: dict[str, tuple[int, int]],
    **changes: Any,
) -> Block:
    """Return one block for two kinds of layers: MoE layers with a shared expert, and layers with a dense MLP. The
    router is not sharded.
    """
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
    "apertus": _llama(
        plain_mlp("up_proj", "down_proj", shared=("act_fn",)),
        shared=("q_norm", "k_norm"),
    ),
    "bitnet": _llama(replace(LLAMA_MLP, across=("ffn_sub_norm",)), across=("attn_sub_norm",)),
    # DiffLlama subtracts the second half of the heads from the first half, so each half is sharded.
    "diffllama": _llama(
        parts={
            "q_proj": 2,
            "k_proj": 2,
            "v_proj": 2,
        },
        head_groups=2,
        shared=("",),
        dropout=(),
    ),
    "doge": _llama(
        key_value={"k_proj": (), "v_proj": (), "A": (), "dt_proj": ()},
        shared=("q_norm", "k_norm"),
        across=("dt_proj",),
        own_heads=True,
    ),
    # The state-space mixer, which runs in parallel to the attention, is not sharded.
    "falcon_h1": in_layers("layers", self_attn=LLAMA_ATTENTION, feed_forward=LLAMA_MLP),
    # The MLP is not sharded: some layers keep only the activations that are large compared with their row.
    "gemma3n_text": in_layers("layers", self_attn=_GEMMA_ATTENTION),
    **dict.fromkeys(("glm", "glm4"), _llama(_FUSED_MLP)),
    "granite_swa": _llama(own_heads=True),
    "mllama_text_model": in_layers(
        "layers",
        # some layers have cross-attention to the image instead: only queries are computed from text
        self_attn=replace(_MLLAMA_ATTENTION, optional=True),
        cross_attn=replace(
            _MLLAMA_ATTENTION,
            shared=("q_norm", "k_norm"),
            enter_inputs=("cross_attention_states",),
            optional=True,
        ),
        mlp=LLAMA_MLP,
    ),
    "modernbert-decoder": in_layers(
        "layers",
        attn=replace(LLAMA_ATTENTION, row=("Wo",)),
        mlp=Block(
            column=("Wi",),
            row=("Wo",),
            parts={"Wi": 2},
            dropout=("mlp_dropout",),
        ),
    ),
    "hunyuan_v1_dense": _llama(shared=("query_layernorm", "key_layernorm")),
    "lfm2": in_layers(
        "layers",
        self_attn=replace(
            LLAMA_ATTENTION, row=("out_proj",), shared=("q_layernorm", "k_layernorm"), dropout=()
        ),
        conv=_SHORT_CONVOLUTION,
        feed_forward=_LFM_MLP,
    ),
    "lfm3": in_layers(
        "layers",
        self_attn=replace(
            _GEMMA_ATTENTION, column=("q_proj", "k_proj", "v_proj", "g_proj")
        ),  # the gate may be missing
        conv=_SHORT_CONVOLUTION,
        feed_forward=_LFM_MLP,
    ),
    # the norms of queries and keys are over all heads together
    **dict.fromkeys(
        ("olmo2", "olmo3"),
        _llama(
            key_value={"k_proj": (), "v_proj": (), "k_norm": ()},
            across=("q_norm", "k_norm"),
        ),
    ),
    "phi3": _llama(
        _FUSED_MLP,
        column=("qkv_proj",),
        parts={"qkv_proj": query_key_value},
        key_value={"qkv_proj": (1, 2)},
        local_attributes=("num_key_value_heads",),
        local_config=("num_attention_heads",),
    ),
    "recurrent_gemma": in_layers(
        "layers",
        # attention in some layers, a gated linear recurrence with one gate per head in all other layers
        temporal_block=Block(
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
        mlp_block=LLAMA_MLP,
    ),
    "stablelm": _llama(local_attributes=("num_heads", "num_key_value_heads")),
    # Families with experts, latent attention, or kinds of layers that transformers' plan does not cover.
    # The norm after the experts reads their sum over ranks. The attention is not sharded, like in transformers' plan.
    "axk1": in_layers(
        "layers",
        mlp=_mixture(
            "shared_experts",
            _EXPERTS,
            leave=("experts", "shared_experts"),
            outside=("post_mlp_layernorm",),
        ),
    ),
    "gemma4_text": _llama(
        unfit=lambda config: (
            "enable_moe_block has a router beside its experts" if config.enable_moe_block else None
        ),
        shared=("q_norm", "k_norm"),
        optional=True,
    ),
    "gpt_oss": _llama(
        Block(
            column=(),
            row=(),
            # the entries of gate and up are interleaved
            cut={
                "experts.gate_up_proj": (2, 1),
                "experts.gate_up_proj_bias": (1, 1),
                "experts.down_proj": (1, 1),
            },
            pairs=("experts.gate_up_proj", "experts.gate_up_proj_bias"),
            once=("experts.down_proj_bias",),
            rest_shared=True,
            dropout=(),
        ),
        own_heads=True,
    ),
    "hrm_text": Blueprint(
        layers=("L_module.layers", "H_module.layers"),
        blocks={
            "self_attn": replace(
                LLAMA_ATTENTION, column=("q_proj", "k_proj", "v_proj", "gate_proj")
            ),
            "mlp": LLAMA_MLP,
        },
        unfit=lambda config: UNWRITABLE["hrm_text"],
    ),
    "llama4_text": in_layers(
        "layers",
        self_attn=LLAMA_ATTENTION,
        feed_forward=_mixture("shared_expert", _EXPERTS_TRANSPOSED),
    ),
    # Queries have a low-rank projection in some configs, keys and values always.
    "minicpm3": _llama(
        column=("q_proj", "q_b_proj", "kv_b_proj"),
        shared=("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
        optional=True,
    ),
    # A layer is one module: attention, an MLP, experts, or a state-space mixer, which is not sharded.
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
    # The plan in transformers 5.17 covers only the dense layers.
    "qwen2_moe": _llama(_mixture("shared_expert", _EXPERTS)),
}
