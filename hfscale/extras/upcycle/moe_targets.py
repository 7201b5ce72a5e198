"""The table of dense families and their mixture-of-experts targets, and the translation of configs.

Sparse upcycling (Komatsuzaki et al. 2023, "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints") gives
every expert a copy of the dense MLP, and initializes the router at random. While the experts are equal, a token's
output is the experts' output times the sum of the routing weights. So a target family must be able to normalize these
to one.

This file has only names and numbers. :mod:`hfscale.extras.upcycle.expert_tensors` makes the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ...errors import ConfigError

# Fields that describe the saved file, not the computation; ``auto_map`` names code of the dense model.
_OF_THE_FILE = ("architectures", "auto_map", "model_type", "transformers_version", "_name_or_path")

DENSE = "mlp.{projection}_proj.weight"
"""Name of the MLP's ``gate``, ``up`` or ``down`` projection within a layer, the same in all dense families below."""

# The dim of each projection's weight that is the MLP's width.
INTERMEDIATE_DIM = {
    "gate": 0,
    "up": 0,
    "down": 1,
}


@dataclass(frozen=True)
class ExpertWeight:
    """Describe a tensor of a layer's routed experts in the target's checkpoint: of one expert, or of all experts
    stacked.
    """

    # stored name inside the layer. With ``{expert}``, each expert has its own tensor; otherwise one tensor stacks all
    # experts along a new first dim
    name: str
    parts: tuple[str, ...]  # projections in the tensor, concatenated along an expert's first dim


@dataclass(frozen=True)
class SharedExpert:
    """Describe an expert that every token passes in addition to the routed experts, multiplied by the sigmoid of a
    gate. It gets a copy of the MLP too. The gate starts at zero, whose sigmoid is a half, and the routed experts'
    ``down`` weights start halved. So the sum is two halves of the dense output, exact in any floating-point dtype, and
    all weights train.
    """

    name: str
    gate: str
    width_field: str


@dataclass(frozen=True)
class Family:
    """Describe the mixture-of-experts target of a dense family: its tensors, and the translation of config fields."""

    target: str  # the target's ``model_type``
    weights: tuple[ExpertWeight, ...]  # the routed experts' tensors
    router: str  # the name of the router's matrix inside a layer
    count_field: str  # the target's field with the number of experts
    width_field: str = "intermediate_size"  # the target's field with the width of one expert
    fixed: Mapping[str, Any] = field(default_factory=dict)  # further fields: ``norm_topk_prob``
    # The target's field that makes every n-th layer a mixture; ``None``: all layers are mixtures.
    every_field: str | None = None
    # fields that only the dense family has -> the value with which the field has no effect; ``None``: any value
    neutral: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    kept: tuple[str, ...] = ()  # fields that the target reads without declaring them
    # Whether the target applies one sliding window to all layers, even if the config lists several layer types.
    one_window: bool = False
    shared: SharedExpert | None = None  # the target's shared expert


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
    "llama": replace(
        _MIXTRAL, neutral={"mlp_bias": (False,), "attention_bias": (False,), "pretraining_tp": None}
    ),
    "mistral": _MIXTRAL,
    "qwen2": _QWEN2_MOE,
    "qwen3": _QWEN3_MOE,
    "olmo2": _FLEX_OLMO,
    "granite": _GRANITEMOE,
}
"""``model_type`` of a dense family -> its mixture-of-experts target, and the translation of its config."""

REFUSED = {
    "olmo": "its layer norms have no weights and its queries and keys no norms, while olmoe's have both",
    "olmo3": "flex_olmo, which has its layers, has no sliding windows",
    "phi3": "phimoe has layer norms where phi3 has RMS norms, and routing weights that do not sum to one",
}
"""Families that seem to fit a mixture of experts but do not, and why."""


def find_family(config: PreTrainedConfig) -> Family:
    """Return how the family of ``config`` is upcycled; raise ConfigError if it is not in the table."""
    kind = config.model_type
    if kind in FAMILIES:
        return FAMILIES[kind]
    known = ", ".join(f"{dense} -> {family.target}" for dense, family in FAMILIES.items())
    if kind in REFUSED:
        why = REFUSED[kind]
    elif any(
        getattr(config, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        why = "it is a mixture of experts already"
    else:
        why = "hfscale has no mixture of experts with such layers in its table"
    raise ConfigError(
        f"a {kind!r} model cannot be upcycled: {why}. Supported are {known}; to add another family, add an entry to "
        "hfscale/extras/upcycle/moe_targets.py"
    )


def upcycled_config(
    config: PreTrainedConfig, *, num_experts: int, top_k: int, every: int
) -> PreTrainedConfig:
    """Return the target's config: common fields are copied, the remaining ones translated. Raise with a list of all
    problems.
    """
    family = find_family(config)
    problems = _arguments(config, family, num_experts, top_k, every)
    values: dict[str, Any] = config.to_dict()
    if values.get("quantization_config"):
        problems.append(
            "its weights are quantized (quantization_config), and quantized copies cannot be varied or trained: load "
            "it with dtype='bfloat16' or dequantize() it, save it, and upcycle that"
        )
    kind = CONFIG_MAPPING[family.target]
    ours = _fields(type(config))
    theirs = _fields(kind)
    carried = {}
    for name, value in values.items():
        if name in _OF_THE_FILE or name == "quantization_config":
            continue
        if name in family.kept or (name in ours) == (name in theirs):
            carried[name] = value
        elif (
            name in ours
            and (allowed := family.neutral.get(name, ())) is not None
            and value not in allowed
        ):
            without = f"with {name}={allowed[0]!r}" if allowed else "without it"
            problems.append(
                f"{name}={value!r} does not fit a {family.target} config: upcycle a model {without}"
            )
    if family.one_window:
        carried.update(_one_window(config, family, problems))
    if problems:
        raise ConfigError(
            f"this {config.model_type!r} model cannot be upcycled: " + "; ".join(problems)
        )
    width = config.intermediate_size
    carried.update({"intermediate_size": width, family.width_field: width, **family.fixed})
    carried.update({family.count_field: num_experts, "num_experts_per_tok": top_k})
    if family.every_field:
        carried[family.every_field] = every
    if family.shared:
        carried[family.shared.width_field] = width
    return kind(**carried)


def _fields(kind: type[PreTrainedConfig]) -> set[str]:
    """Return the fields that a config class declares; models read no other fields."""
    return set(kind().to_dict())


def _arguments(
    config: PreTrainedConfig, family: Family, num_experts: int, top_k: int, every: int
) -> list[str]:
    problems = []
    if not 1 <= top_k <= num_experts:
        problems.append(
            f"top_k={top_k} of num_experts={num_experts} is invalid: use 1 to {num_experts}"
        )
    if not 1 <= every <= config.num_hidden_layers:
        problems.append(
            f"every={every} is invalid with {config.num_hidden_layers} layers: use at most that"
        )
    elif every != 1 and family.every_field is None:
        problems.append(
            f"every={every} leaves layers dense, but in a {family.target} model every layer is a mixture: use every=1"
        )
    return problems


def _one_window(
    config: Any,
    family: Family,
    problems: list[str],
) -> dict[str, Any]:
    """Return the config fields of the sliding window that all layers share; add to ``problems`` if some layers have a
    window and others have none.
    """
    kinds = set(config.layer_types)
    if len(kinds) > 1:
        problems.append(
            f"its layer_types mix {' and '.join(sorted(kinds))}, but a {family.target} model has one window for all "
            "layers: set layer_types alike (which changes what the model computes), or use_sliding_window=False"
        )
    slides = kinds == {"sliding_attention"}
    return {
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window if slides else None,
    }
