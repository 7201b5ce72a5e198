"""Translate a dense model's config to that of a mixture of experts, or say why that is impossible."""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ...errors import ConfigError
from .moe_targets import FAMILIES, REFUSED, Family

# Fields about how a config was saved, not what the model computes; ``auto_map`` names code of the dense model.
_OF_THE_FILE = ("architectures", "auto_map", "model_type", "transformers_version", "_name_or_path")


def find_family(config: PreTrainedConfig) -> Family:
    """Return how the family of ``config`` is upcycled.

    Raises:
        ConfigError: it is not one of the dense families in the table.
    """
    kind = config.model_type
    if kind in FAMILIES:
        return FAMILIES[kind]
    known = ", ".join(f"{dense} -> {family.target}" for dense, family in FAMILIES.items())
    if kind in REFUSED:
        why = REFUSED[kind]
    elif any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        why = "it is a mixture of experts already"
    else:
        why = "hfscale knows no mixture of experts with its layers"
    raise ConfigError(
        f"a {kind!r} model cannot be upcycled: {why}. Upcycled are {known}; another family is an entry in "
        "hfscale/checkpoint/upcycle/moe_targets.py"
    )


def upcycled_config(config: PreTrainedConfig, *, num_experts: int, top_k: int, every: int) -> PreTrainedConfig:
    """Return the target's config: fields that both families have are copied, the rest is translated.

    Args:
        config: of the dense model.
        num_experts: experts per layer.
        top_k: how many of them a token is sent to.
        every: every ``every``-th layer becomes a mixture, starting with layer ``every - 1``.

    Raises:
        ConfigError: the family, a feature of the model or an argument does not fit; every reason is listed.
    """
    family = find_family(config)
    problems = _arguments(config, family, num_experts, top_k, every)
    values: dict[str, Any] = config.to_dict()
    if values.get("quantization_config"):
        problems.append(
            "its weights are quantized (quantization_config), and copies of codes cannot be varied or trained: load it "
            "with dtype='bfloat16' or dequantize() it, save it, and upcycle that"
        )
    kind = CONFIG_MAPPING[family.target]
    ours, theirs = _fields(type(config)), _fields(kind)
    carried = {}
    for name, value in values.items():
        if name in _OF_THE_FILE or name == "quantization_config":
            continue
        if name in family.kept or (name in ours) == (name in theirs):
            carried[name] = value
        elif name in ours and not _is_neutral(family, name, value):
            problems.append(
                f"{name}={value!r} cannot be said in a {family.target} config: upcycle a model {_without(family, name)}"
            )
    if family.one_window:
        carried.update(_one_window(config, family, problems))
    if problems:
        raise ConfigError(f"this {config.model_type!r} model cannot be upcycled: " + "; ".join(problems))
    width = config.intermediate_size
    carried.update({"intermediate_size": width, family.width_field: width, **family.fixed})
    carried.update({family.count_field: num_experts, "num_experts_per_tok": top_k})
    if family.every_field:
        carried[family.every_field] = every
    if family.shared:
        carried[family.shared.width_field] = width
    return kind(**carried)


def mixture_layers(config: PreTrainedConfig, every: int) -> list[int]:
    """Return the layers that become mixtures."""
    return list(range(every - 1, config.num_hidden_layers, every))


def _fields(kind: type[PreTrainedConfig]) -> set[str]:
    """Return the fields that a config class declares; the model does not read others."""
    return set(kind().to_dict())


def _arguments(config: PreTrainedConfig, family: Family, num_experts: int, top_k: int, every: int) -> list[str]:
    problems = []
    if not 1 <= top_k <= num_experts:
        problems.append(f"top_k={top_k} of num_experts={num_experts} is impossible: use 1 to {num_experts}")
    if not 1 <= every <= config.num_hidden_layers:
        problems.append(f"every={every} is impossible with {config.num_hidden_layers} layers: use 1 to that many")
    elif every != 1 and family.every_field is None:
        problems.append(
            f"every={every} leaves layers dense, and in a {family.target} model every layer is a mixture: use every=1"
        )
    return problems


def _is_neutral(family: Family, name: str, value: Any) -> bool:
    if name not in family.neutral:
        return False
    allowed = family.neutral[name]
    return allowed is None or value in allowed


def _without(family: Family, name: str) -> str:
    allowed = family.neutral.get(name)
    return f"with {name}={allowed[0]!r}" if allowed else "without it"


def _one_window(config: Any, family: Family, problems: list[str]) -> dict[str, Any]:
    """Return the sliding window of all layers; the dense family may mix layers with and without one."""
    kinds = set(config.layer_types)
    if len(kinds) > 1:
        problems.append(
            f"its layer_types mix {' and '.join(sorted(kinds))}, and a {family.target} model has one window for all "
            "layers: set layer_types alike (which changes what the model computes), or use_sliding_window=False"
        )
    slides = kinds == {"sliding_attention"}
    return {"use_sliding_window": slides, "sliding_window": config.sliding_window if slides else None}
