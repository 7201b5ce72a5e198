"""Mixtures of experts in stock models."""

from typing import Any

from torch import Tensor, nn


def use_eager_experts(model: nn.Module) -> None:
    """Let mixtures of experts compute by the stock classes' own code, which takes every type: grouped products do not
    take float64. No-op for other models.
    """
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        if getattr(config, "_experts_implementation", None) is not None:
            compute_eagerly(config)


def compute_eagerly(config: Any) -> None:
    """Let a model that is built from ``config`` compute its experts by the stock classes' own code."""
    config._experts_implementation = "eager"


def apply_gate(experts: Any, both: Tensor) -> Tensor:
    """What the gate of the host's module of experts makes of gate and up projections side by side."""
    gated: Tensor = experts._apply_gate(both)
    return gated


def runs_grouped_products(experts: Any) -> bool:
    """Whether the host's module of experts calls torch's grouped matrix product."""
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm"


# What these record under the name of logits is a softmax of them.
_RECORD_PROBABILITIES = ("Gemma4TextRouter", "DiffusionGemmaTextRouter")


def router_logits(model: nn.Module) -> dict[type[nn.Module], int]:
    """Classes of routers that the host records logits of -> where in a router's output they are.

    Not those whose logits are recorded behind a softmax, nor modules recorded by another mark than their class.
    """
    found: dict[type[nn.Module], int] = {}
    for part in model.modules():
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorded if isinstance(recorded, list | tuple) else [recorded]:
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type) and kind.__name__ not in _RECORD_PROBABILITIES:
                found[kind] = getattr(recorder, "index", 0)
    return found
