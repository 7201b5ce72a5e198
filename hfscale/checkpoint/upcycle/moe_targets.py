"""The table of dense families and the mixtures of experts they are upcycled to, and how configs translate.

Sparse upcycling (Komatsuzaki et al. 2023, "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints") gives
every expert a copy of the dense MLP and initializes the router at random. While the experts are equal a token's output
is their output times the sum of its routing weights, so a target family must be able to normalize those to one.

Everything here is names and numbers. :mod:`hfscale.checkpoint.upcycle.upcycle` moves the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

DENSE = "mlp.{projection}_proj.weight"
"""Name in a layer of the MLP's ``gate``, ``up`` or ``down`` projection, in every dense family below."""

INTERMEDIATE_DIM = {"gate": 0, "up": 0, "down": 1}
"""The dim of each projection's weight that has the MLP's width."""


@dataclass(frozen=True)
class ExpertWeight:
    """One tensor, or one per expert, of a layer's routed experts in the target's checkpoint.

    Attributes:
        name: inside the layer, as stored. With ``{expert}`` each expert has its own tensor; without, one tensor holds
            all experts along a new first dim.
        parts: the projections in it, concatenated along an expert's first dim.
    """

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class SharedExpert:
    """An expert of the target that computes every token, besides the routed ones, times the sigmoid of a gate.

    It gets a copy of the MLP too. Its gate starts at zero, whose sigmoid is a half, and the routed experts' ``down``
    starts halved: two halves of the dense output, exact in any floating-point type, and everything trains.
    """

    name: str
    gate: str
    width_field: str


@dataclass(frozen=True)
class Family:
    """How a dense family becomes a mixture of experts.

    Attributes:
        target: the ``model_type`` it becomes.
        weights: the routed experts' tensors.
        router: the name of the router's matrix inside a layer.
        count_field: the target's field with the number of experts.
        width_field: the target's field with the width of one expert.
        fixed: further fields of the target, such as the one that normalizes routing weights.
        every_field: the target's field that makes only every n-th layer a mixture; ``None`` if all layers must be.
        neutral: fields that only the dense family has, and the values with which they have no effect; ``None``: any.
        kept: fields that the target reads without declaring them.
        one_window: whether the target has one sliding window for all layers, and the dense family types of layers.
        shared: the target's shared expert.
    """

    target: str
    weights: tuple[ExpertWeight, ...]
    router: str
    count_field: str
    width_field: str = "intermediate_size"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    every_field: str | None = None
    neutral: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    one_window: bool = False
    shared: SharedExpert | None = None

    def start(self, projection: str) -> float:
        """Return the factor on a routed expert's copy of a projection."""
        return 0.5 if self.shared is not None and projection == "down" else 1.0


_MIXTRAL = Family(
    target="mixtral",
    weights=(
        ExpertWeight("block_sparse_moe.experts.{expert}.w1.weight", ("gate",)),
        ExpertWeight("block_sparse_moe.experts.{expert}.w3.weight", ("up",)),
        ExpertWeight("block_sparse_moe.experts.{expert}.w2.weight", ("down",)),
    ),
    router="block_sparse_moe.gate.weight",
    count_field="num_local_experts",
)
_FLEX_OLMO = Family(
    target="flex_olmo",
    weights=(
        ExpertWeight("mlp.experts.{expert}.gate_proj.weight", ("gate",)),
        ExpertWeight("mlp.experts.{expert}.up_proj.weight", ("up",)),
        ExpertWeight("mlp.experts.{expert}.down_proj.weight", ("down",)),
    ),
    router="mlp.gate.weight",
    count_field="num_experts",
    fixed={"norm_topk_prob": True},
)
_QWEN3_MOE = replace(
    _FLEX_OLMO,
    target="qwen3_moe",
    width_field="moe_intermediate_size",
    every_field="decoder_sparse_step",
    neutral={"layer_types": None, "max_window_layers": None},
    kept=("head_dim",),
    one_window=True,
)
_QWEN2_MOE = replace(
    _FLEX_OLMO,
    target="qwen2_moe",
    width_field="moe_intermediate_size",
    every_field="decoder_sparse_step",
    fixed={"norm_topk_prob": True, "qkv_bias": True},
    shared=SharedExpert(
        "mlp.shared_expert.{projection}_proj.weight",
        "mlp.shared_expert_gate.weight",
        "shared_expert_intermediate_size",
    ),
)
_GRANITEMOE = Family(
    target="granitemoe",
    weights=(
        ExpertWeight("block_sparse_moe.input_linear.weight", ("gate", "up")),
        ExpertWeight("block_sparse_moe.output_linear.weight", ("down",)),
    ),
    router="block_sparse_moe.router.layer.weight",
    count_field="num_local_experts",
    neutral={"mlp_bias": (False,)},
)

FAMILIES: dict[str, Family] = {
    "llama": replace(_MIXTRAL, neutral={"mlp_bias": (False,), "attention_bias": (False,), "pretraining_tp": None}),
    "mistral": _MIXTRAL,
    "qwen2": _QWEN2_MOE,
    "qwen3": _QWEN3_MOE,
    "olmo2": _FLEX_OLMO,
    "granite": _GRANITEMOE,
}
"""Dense ``model_type`` -> how it is upcycled."""

REFUSED = {
    "olmo": "its layer norms have no weights and its queries and keys no norms, while olmoe's have both",
    "olmo3": "flex_olmo, which has its layers, has no sliding windows",
    "phi3": "phimoe has layer norms where phi3 has RMS norms, and routing weights that do not sum to one",
}
"""Families that seem to fit a mixture of experts, and why they do not."""
