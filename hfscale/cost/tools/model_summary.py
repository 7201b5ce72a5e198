"""Summarize a model in the numbers that its time and memory depend on, so that a search over layouts plans the model
only once, for one process.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from ...api.build import plan as make_plan
from ...config.memory import MemoryConfig
from ...config.parallel import ParallelConfig
from ...plan import Plan
from ...plan.feature_plans import weights_in_8_bits
from ..model.activation_bytes import trained_names
from ..model.job import Job, job_of, matrix_entries
from ..model.layer_bytes import layer_bytes, stream_width, types_of
from ..model.memory_model import estimate_memory
from ..model.model_shape import ModelShape, shape_of_plan
from ..model.situation import LayerBytes, MeasuredLayers, Situation, Types
from .measure_layers import measured_layers
from .simulated_rank import RunSpec, run_spec

TILE = 8192  # tokens per tile to try if sequences are several times longer


@dataclass(frozen=True)
class Kept:
    """Hold the activation bytes per token of one layer, in a form from which those for any number of tensor-parallel
    ranks follow.
    """

    cut: float  # bytes that are sharded over tensor-parallel ranks, with sequence parallelism
    whole: float  # bytes that each tensor-parallel rank has in addition
    again: float = 0.0  # bytes that the layer recomputes at once; sharded
    passing: float = 0.0  # gradients of activations in its backward pass; sharded

    def over(self, tp: int) -> float:
        """Return the kept bytes per token on each of ``tp`` tensor-parallel ranks: a shard of the activations, and the
        tensors that are gathered from other ranks (none if ``tp`` is 1).
        """
        return self.cut / tp + self.whole * (1 - 1 / tp)


@dataclass(frozen=True)
class ModelSummary:
    """Hold the numbers of a model and its training from which a search estimates the time and memory of any layout."""

    shape: ModelShape
    heads: int  # query heads, which tensor-parallel ranks shard
    job: Job  # a step of one process; layouts change its sizes
    # Bytes of weights, adapters, gradients and optimizer state per matrix entry.
    states: float
    optimizer: float  # bytes of optimizer state per matrix entry
    weight: float  # bytes of weights per matrix entry
    # Bytes that a layer keeps, by its place and the way in which it is recomputed. Places: on ``data`` ranks;
    # ``alone``, without data parallelism, where mixed precision is autocast; with experts ``spread`` over ranks. Ways:
    # ``none``; ``elementwise``; ``tiles``, which is elementwise in tiles of tokens.
    kept: Mapping[tuple[str, str], Kept]
    stream: float  # bytes of a layer's input, on one rank
    head: float  # bytes per entry of the head's gradient, before it is added up
    family: str

    def gathered(
        self, job: Job, layers: float, whole: float, around: float, offload: Collection[str]
    ) -> float:
        """Return the bytes of the weights that a rank has all-gathered, cast or copied from the CPU at once. The rank
        has ``layers`` layers, ``whole`` weights, and ``around`` of these outside the layers.
        """
        width = job.gathered_bytes
        casts = width < 0.9 * self.weight  # ``weight`` includes vectors
        sharded = job.layout.dp_shard > 1
        if not (sharded or casts or "parameters" in offload):
            return 0.0
        if job.layout.data_world == 1:
            return 2 * whole
        layer = self.shape.held(job.layout.tp) + self.shape.expert_weights / job.expert_ranks
        count = min(layers, 1) if job.layout.pp == 1 and sharded else layers
        return width * (count * layer + around)


def summarize(
    config: PreTrainedConfig,
    *,
    mixed_precision: str = "no",
    optimizer: str = "adamw_torch_fused",
    sequence: int = 4096,
    tile: int | None = None,  # tokens per tile; by default chosen if sequences are long
    **given: Any,
) -> ModelSummary:
    """Summarize a model and its training for a search over layouts. ``given`` are arguments of :func:`hfscale.plan`."""
    mixed = mixed_precision
    plan = make_plan(config, mixed_precision=mixed_precision, **given)
    spec = run_spec(config, mixed_precision=mixed_precision, **given)
    shape = shape_of_plan(plan, config)
    trained = trained_names(plan)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or getattr(text, "n_head", None) or 1
    held = estimate_memory(plan, optimizer=optimizer, mixed_precision=mixed_precision)
    entries = sum(matrix_entries(plan).values())
    types = types_of(plan) if mixed_precision == "no" else Types(2, 2)
    layer = plan.layers[len(plan.layers) // 2]
    situation = Situation(sequence, trained=trained, routes=shape.routed or None)

    def planned(**memory: Any) -> tuple[Plan, RunSpec]:
        more = {**given, "mixed_precision": mixed, "memory": MemoryConfig(**memory)}
        return make_plan(config, **more), run_spec(config, **more)

    ways = {"none": (plan, spec), "elementwise": planned(recompute="elementwise")}
    tile = tile or (
        TILE if sequence > 2 * TILE and not (plan.mixtures or weights_in_8_bits(plan)) else None
    )
    if tile is not None:
        ways["tiles"] = planned(recompute="elementwise", tile_tokens=tile)
    return ModelSummary(
        shape=replace(shape, hidden=stream_width(plan, layer)),
        heads=int(heads),
        job=replace(
            job_of(
                plan,
                sequence=sequence,
                batch=1,
                microbatches=1,
                mixed=mixed,
            ),
            tile=tile or 0,
        ),
        states=(held.weights + held.adapters + held.gradients + held.optimizer) / entries,
        optimizer=held.optimizer / entries,
        weight=held.weights / entries,
        kept=_kept(ways, layer, types, situation),
        stream=layer_bytes(plan, layer, situation, types).stream,
        head=max(4, types.size) if f"{plan.head}.weight" in trained else 0,
        family=plan.family,
    )


def _kept(
    ways: Mapping[str, tuple[Plan, RunSpec]], layer: str, types: Types, situation: Situation
) -> dict[tuple[str, str], Kept]:
    """Return the activation bytes per token of a layer, for :attr:`ModelSummary.kept`: by a formula, or measured on one
    and two tensor-parallel ranks. ``ways`` are plans of one process that recompute activations differently.
    """
    plan, spec = ways["none"]
    data: dict[str, Any] = {"dp_shard_size": 2}
    places = {"data": data, "alone": data, "spread": data}
    if spec.mixed_precision != "no":
        places["alone"] = {}
    if plan.mixtures:
        places["spread"] = {**data, "ep_size": 2}

    def seen(plan: Plan, spec: RunSpec, sizes: dict[str, Any]) -> Kept:
        one, two = (
            measured_layers(plan, spec, situation.tokens, 2, ParallelConfig(**{**sizes, **more}))
            for more in ({}, {"tp_size": 2, "sequence_parallel": True})
        )
        computed = types if sizes else types_of(plan, spec.mixed_precision)
        by_formula = layer_bytes(plan, layer, situation, computed)
        cut, again, passing = _parts(by_formula) if one is None else _mean(one, plan)
        whole = 2 * by_formula.stream if two is None else 2 * _mean(two, plan)[0] - cut
        return Kept(cut, whole, again, passing)

    return {
        (place, way): seen(*planned, sizes)
        for place, sizes in places.items()
        for way, planned in ways.items()
    }


def _parts(layer: LayerBytes) -> tuple[float, float, float]:
    return layer.kept, layer.again, layer.passing


def _mean(seen: MeasuredLayers, plan: Plan) -> tuple[float, float, float]:
    """Return three numbers of measured bytes per token: kept by a layer (the mean over layers), recomputed by a layer
    (the maximum), and of gradients of activations in a layer (the maximum).
    """
    sizes = [
        _parts(known)
        for known in (seen.of_layer(plan, layer) for layer in plan.layers)
        if known is not None
    ]
    kept, again, passing = zip(*sizes, strict=True)
    return sum(kept) / len(sizes), max(again), max(passing)
