"""The shape of a model, from its config where that says it, and otherwise from the weights of a plan."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from ...errors import ConfigError
from ...plan import Plan
from .layer_bytes import stream_width
from .model_shape import ModelShape, shape_of


def shape_of_plan(plan: Plan, config: Any = None) -> ModelShape:
    """The shape of the decoder of a plan: its layers have, in the mean, as many weights as the plan's.

    Args:
        config: of the model, which says how wide heads are; without it they are as wide as the stream together.

    Raises:
        ConfigError: the plan has no layers.
    """
    if not plan.layers:
        raise ConfigError(f"a {plan.family!r} model has no layers that hfscale knows: its times cannot be estimated")
    found = shape_of(config) if config is not None else _guessed(plan)
    found = replace(found, layers=len(plan.layers), gated=_gates(plan))
    if plan.mixtures and not found.experts:  # under a name that no other config gives them
        found = replace(found, experts=plan.mixtures[0].count, routed=found.routed or 1)
    rows = found.hidden * (3 if found.gated else 2) * len(plan.layers)  # entries that one more of width is
    matrices = list(_matrices(plan, found.experts))
    dense = sum(entries for _, entries, spread in matrices if not spread)
    spread = sum(entries for _, entries, spread in matrices if spread)
    if dense < len(plan.layers) * found.attention_weights:  # layers without attention
        found = replace(found, queries=0, keys=0)
    rest = dense - len(plan.layers) * (found.attention_weights + found.hidden * found.experts)
    if spread:
        return replace(found, ffn=max(1, round(spread / rows / found.experts)), shared=max(0, round(rest / rows)))
    return replace(found, ffn=max(1, round(rest / rows)), experts=0, routed=0)


def _gates(plan: Plan) -> bool:
    """Whether the MLP of the first layer has a gate: a matrix of its own, or fused with another."""
    return any("gate" in name.removeprefix(plan.layers[0]) for name, _, _ in _matrices(plan)) or any(
        name.endswith((".w3.weight", ".wi_1.weight")) for name, _, _ in _matrices(plan)
    )


def _matrices(plan: Plan, experts: int = 0) -> Iterator[tuple[str, int, bool]]:
    """Name, entries, and whether they are of experts, of the matrices of all layers.

    Args:
        experts: of a mixture; what stacks as many matrices is theirs.
    """
    adapters = {adapter.name for adapter in plan.adapters}
    mixtures = tuple(f"{mixture.name}." for mixture in plan.mixtures)
    layers = tuple(f"{layer}." for layer in plan.layers)
    for planned in plan.owned():
        if len(planned.shape) > 1 and planned.name.startswith(layers) and planned.name not in adapters:
            stacked = len(planned.shape) > 2 and planned.shape[0] == experts
            yield planned.name, prod(planned.shape), stacked or (bool(mixtures) and planned.name.startswith(mixtures))


def _guessed(plan: Plan) -> ModelShape:
    hidden = stream_width(plan, plan.layers[0])
    head = plan.by_name.get(f"{plan.head}.weight")
    by_end = {planned.name.rpartition(".weight")[0].rpartition(".")[2]: planned for planned in plan.owned()}
    queries, keys = (by_end.get(name) for name in ("q_proj", "k_proj"))
    width = queries.shape[0] if queries is not None else hidden
    mixture = plan.mixtures[0].count if plan.mixtures else 0
    return ModelShape(
        layers=len(plan.layers),
        hidden=hidden,
        queries=width,
        keys=keys.shape[0] if keys is not None else width,
        ffn=4 * hidden,
        vocabulary=head.shape[0] if head is not None else 0,
        tied=head is not None and head.tied_to is not None,
        experts=mixture,
        routed=min(2, mixture),
    )
