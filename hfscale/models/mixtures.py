"""Blueprints of decoders with mixtures of experts, latent attention or several kinds of layers that transformers' plan
does not cover.
"""

from dataclasses import replace
from typing import Any

from .blueprint import Block, Blueprint, in_layers
from .family_limits import UNWRITABLE

_ATTENTION = Block(column=("q_proj", "k_proj", "v_proj"), row=("o_proj",))
_MLP = Block(column=("gate_proj", "up_proj"), row=("down_proj",), dropout=())
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


MIXTURES: dict[str, Blueprint] = {
    # The norm behind the mixture reads what is summed. The attention stays whole, as in the host's plan.
    "axk1": in_layers(
        "layers",
        mlp=_mixture("shared_experts", _EXPERTS, leave=("experts", "shared_experts"), outside=("post_mlp_layernorm",)),
    ),
    "gemma4_text": Blueprint(
        layers="layers",
        blocks={
            # some layers read the keys and values of others, of the same heads
            "self_attn": replace(_ATTENTION, shared=("q_norm", "k_norm"), optional=True),
            "mlp": _MLP,
        },
        unfit=lambda config: "enable_moe_block has a router beside its experts" if config.enable_moe_block else None,
    ),
    "gpt_oss": in_layers(
        "layers",
        self_attn=replace(_ATTENTION, own_heads=True),
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
        blocks={"self_attn": replace(_ATTENTION, column=("q_proj", "k_proj", "v_proj", "gate_proj")), "mlp": _MLP},
        unfit=lambda config: UNWRITABLE["hrm_text"],
    ),
    "llama4_text": Blueprint(
        layers="layers",
        blocks={"self_attn": _ATTENTION, "feed_forward": _mixture("shared_expert", _EXPERTS_TRANSPOSED)},
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
        mlp=_MLP,
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
    "qwen2_moe": Blueprint(
        layers="layers", blocks={"self_attn": _ATTENTION, "mlp": _mixture("shared_expert", _EXPERTS)}
    ),
}
