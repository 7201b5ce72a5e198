"""What a search over layouts has to know of a model: read once from the plan of one process, then only arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ...config.parallel import ParallelConfig
from ...plan import Plan
from ..model.jobs import gathered_bytes, gradient_bytes, trained_fraction, unpacked_bytes
from ..model.layer_bytes import Types, layer_bytes, stream_width
from ..model.measured_layers import MeasuredLayers
from ..model.memory import estimate_memory
from ..model.model_shape import ModelShape
from ..model.recompute import is_matrix, trained_names, types_of
from ..model.shapes import shape_of_plan
from .measure_layers import measured_layers
from .meta_model import RunSpec


@dataclass(frozen=True)
class Kept:
    """Bytes that a layer keeps of a token.

    Attributes:
        cut: what tensor ranks with sequence parallelism share out.
        whole: what each of them has.
    """

    cut: float
    whole: float

    def over(self, tp: int) -> float:
        """On each of so many tensor ranks; on a single one, what is gathered is what there is anyway."""
        return self.cut / tp + self.whole * (1 - 1 / tp)


@dataclass(frozen=True)
class ModelSummary:
    """A model and how it is trained.

    Attributes:
        shape: of its decoder.
        heads: query heads, which tensor ranks share out.
        states: bytes of weights, adapters, gradients and optimizer, for every entry of a weight.
        optimizer: of these, the optimizer's.
        weight: bytes of a weight, likewise.
        width: bytes of a weight while data ranks have it gathered.
        kept: what a layer keeps of a token.
        kept_alone: likewise without data ranks, where mixed precision is autocast.
        kept_spread: likewise where experts are spread over ranks.
        stream: bytes of a layer's input, on one rank.
        head: bytes of the head's gradient for each of its entries, before it is added up.
        trained: fraction of the entries that trains.
        unpacked: bytes moved for every weight of a quantized base.
        gradient: bytes of a gradient.
        value: bytes of a value of the stream.
        family: the kind of model.
    """

    shape: ModelShape
    heads: int
    states: float
    optimizer: float
    weight: float
    width: float
    kept: Kept
    kept_alone: Kept
    kept_spread: Kept
    stream: float
    head: float
    trained: float
    unpacked: float
    gradient: float
    value: float
    family: str


def summarize(
    plan: Plan,
    asked: RunSpec,
    optimizer: str = "adamw_torch_fused",
    optim_args: Mapping[str, Any] | None = None,
    *,
    sequence: int = 4096,
) -> ModelSummary:
    """The facts of a plan of one process.

    Args:
        asked: the config that it is of, and how it is trained.
        sequence: tokens of a sequence, for layers whose bytes no formula says.

    Raises:
        ConfigError: the optimizer is unknown, or the model has no layers.
    """
    assert plan.layout == ParallelConfig(), "facts are read from the plan of one process"
    mixed = asked.mixed_precision != "no"
    shape = shape_of_plan(plan, asked.config)
    text = asked.config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or getattr(text, "n_head", None) or 1
    held = estimate_memory(plan, optimizer=optimizer, options=optim_args, mixed_precision=asked.mixed_precision)
    entries = sum(prod(p.shape) for p in plan.owned() if is_matrix(plan, p.name))
    trained = trained_names(plan)
    types = Types(2, 2) if mixed else types_of(plan, False)
    layer = plan.layers[len(plan.layers) // 2]
    return ModelSummary(
        shape=replace(shape, hidden=stream_width(plan, layer)),
        heads=int(heads),
        states=(held.weights + held.adapters + held.gradients + held.optimizer) / entries,
        optimizer=held.optimizer / entries,
        weight=held.weights / entries,
        width=gathered_bytes(plan, mixed),
        **_kept(plan, asked, layer, types, shape.routed or None, sequence),
        stream=layer_bytes(plan, layer, {}, types, trained).stream,
        head=max(4, types.size) if f"{plan.head}.weight" in trained else 0,
        trained=trained_fraction(plan),
        unpacked=unpacked_bytes(plan),
        gradient=gradient_bytes(plan),
        value=types.size,
        family=plan.family,
    )


def _kept(plan: Plan, asked: RunSpec, layer: str, types: Types, routes: int | None, sequence: int) -> dict[str, Kept]:
    """By a formula, or counted on one and on two tensor ranks."""
    mixed, trained, data = asked.mixed_precision != "no", trained_names(plan), {"dp_shard_size": 2}

    def of(alone: bool, **sizes: Any) -> Kept:
        one, two = (
            measured_layers(plan, asked, sequence, 2, ParallelConfig(**{**sizes, **more}))
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
    """Of the layers."""
    found = [known.kept for known in (seen.of_layer(plan, layer) for layer in plan.layers) if known is not None]
    return sum(found) / len(found)
