"""What a search over layouts has to know of a model: read once from the plan of one process, then only arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ...config import ParallelConfig
from ...plan import Plan
from ..model.activation_bytes import is_matrix, trained_names
from ..model.job import Job, job_of
from ..model.layer_bytes import Types, layer_bytes, stream_width, types_of
from ..model.measured_layers import MeasuredLayers
from ..model.memory import estimate_memory
from ..model.model_shape import ModelShape, shape_of_plan
from .measure_layers import measured_layers
from .meta_model import RunSpec


@dataclass(frozen=True)
class Kept:
    """Bytes that a layer keeps of a token."""

    cut: float  # what tensor ranks with sequence parallelism share out
    whole: float  # what each of them has

    def over(self, tp: int) -> float:
        """Return them on each of ``tp`` tensor ranks; on a single one, what is gathered is what there is anyway."""
        return self.cut / tp + self.whole * (1 - 1 / tp)


@dataclass(frozen=True)
class ModelSummary:
    """A model and how it is trained."""

    shape: ModelShape
    heads: int  # query heads, which tensor ranks share out
    job: Job  # a step of one process, of which layouts change the sizes
    states: float  # bytes of weights, adapters, gradients and optimizer, for every entry of a weight
    optimizer: float  # of these, the optimizer's
    weight: float  # bytes of a weight, likewise
    kept: Kept  # what a layer keeps of a token
    kept_alone: Kept  # likewise without data ranks, where mixed precision is autocast
    kept_spread: Kept  # likewise where experts are spread over ranks
    stream: float  # bytes of a layer's input, on one rank
    head: float  # bytes of the head's gradient for each of its entries, before it is added up
    family: str


def summarize(
    plan: Plan,
    spec: RunSpec,
    optimizer: str = "adamw_torch_fused",
    optim_args: Mapping[str, Any] | None = None,
    *,
    sequence: int = 4096,
) -> ModelSummary:
    """Summarize the model of a plan of one process.

    Args:
        spec: the config that it is of, and how it is trained.
        sequence: tokens of a sequence, for layers whose bytes no formula says.

    Raises:
        ConfigError: the optimizer is unknown, or the model has no layers.
    """
    assert plan.layout == ParallelConfig(), "a summary is read from the plan of one process"
    mixed = spec.mixed_precision != "no"
    shape, trained = shape_of_plan(plan, spec.config), trained_names(plan)
    text = spec.config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or getattr(text, "n_head", None) or 1
    held = estimate_memory(plan, optimizer=optimizer, options=optim_args, mixed_precision=spec.mixed_precision)
    entries = sum(prod(p.shape) for p in plan.owned() if is_matrix(plan, p.name))
    types = Types(2, 2) if mixed else types_of(plan, False)
    layer = plan.layers[len(plan.layers) // 2]
    return ModelSummary(
        shape=replace(shape, hidden=stream_width(plan, layer)),
        heads=int(heads),
        job=job_of(plan, sequence=sequence, batch=1, microbatches=1, mixed=mixed),
        states=(held.weights + held.adapters + held.gradients + held.optimizer) / entries,
        optimizer=held.optimizer / entries,
        weight=held.weights / entries,
        **_kept(plan, spec, layer, types, shape.routed or None, sequence),
        stream=layer_bytes(plan, layer, {}, types, trained).stream,
        head=max(4, types.size) if f"{plan.head}.weight" in trained else 0,
        family=plan.family,
    )


def _kept(plan: Plan, spec: RunSpec, layer: str, types: Types, routes: int | None, sequence: int) -> dict[str, Kept]:
    """Return what a layer keeps by a formula, or counted on one and on two tensor ranks."""
    mixed, trained, data = spec.mixed_precision != "no", trained_names(plan), {"dp_shard_size": 2}

    def of(alone: bool, **sizes: Any) -> Kept:
        one, two = (
            measured_layers(plan, spec, sequence, 2, ParallelConfig(**{**sizes, **more}))
            for more in ({}, {"tp_size": 2, "sequence_parallel": True})
        )
        computed = types_of(plan, mixed) if alone else types
        by_formula = layer_bytes(plan, layer, {}, computed, trained, routes=routes, length=sequence)
        cut = by_formula.kept if one is None else _mean(one, plan)
        return Kept(cut, 2 * by_formula.stream if two is None else 2 * _mean(two, plan) - cut)

    kept = of(False, **data)
    alone = of(True) if mixed else kept
    return {"kept": kept, "kept_alone": alone, "kept_spread": of(False, **data, ep_size=2) if plan.mixtures else kept}


def _mean(seen: MeasuredLayers, plan: Plan) -> float:
    """Return the mean of the layers."""
    found = [known.kept for known in (seen.of_layer(plan, layer) for layer in plan.layers) if known is not None]
    return sum(found) / len(found)
