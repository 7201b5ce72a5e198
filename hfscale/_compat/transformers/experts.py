"""Mixture-of-experts layers in stock models."""

from typing import Any

from torch import Tensor, nn

# These routers record the softmax of their logits under the name of logits.
_RECORD_PROBABILITIES = ("Gemma4TextRouter", "DiffusionGemmaTextRouter")


def use_eager_experts(model: nn.Module) -> None:
    """Let mixture-of-experts layers run the stock classes' eager code, since grouped matrix products lack float64."""
    configs: dict[int, Any] = {
        id(m.config): m.config for m in model.modules() if hasattr(m, "config")
    }
    for config in configs.values():
        if getattr(config, "_experts_implementation", None) is not None:
            compute_eagerly(config)


def compute_eagerly(config: Any) -> None:
    """Let models built from ``config`` run their experts by the stock classes' eager code."""
    config._experts_implementation = "eager"


def apply_gate(experts: Any, both: Tensor) -> Tensor:
    """Apply the gate of a stock experts module to its gate and up projections, which ``both`` holds concatenated."""
    return experts._apply_gate(both)


def runs_grouped_products(experts: Any) -> bool:
    """Return whether a stock experts module calls torch's grouped matrix product."""
    return (
        getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm"
    )


def router_logits(model: nn.Module) -> dict[type[nn.Module], int]:
    """Map each router class whose logits transformers records (``can_record_outputs``) to the index of the logits in
    the router's output. Routers that record probabilities as logits are left out, and so are modules that transformers
    does not select by class.
    """
    indices: dict[type[nn.Module], int] = {}
    for part in model.modules():
        recorded = getattr(part, "can_record_outputs", {}).get("router_logits", ())
        for recorder in recorded if isinstance(recorded, list | tuple) else [recorded]:
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type) and kind.__name__ not in _RECORD_PROBABILITIES:
                indices[kind] = getattr(recorder, "index", 0)
    return indices
