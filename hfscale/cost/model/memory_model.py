"""Estimate the bytes that a rank holds in training, from a plan alone, without weights or a run.

::

    weights     the rank's shard of every parameter; of quantized ones, bytes and scales; under a schedule without a
                flush, older versions of trained weights too
    adapters    the same for adapters
    gradients   gradients of trained weights
    optimizer   the optimizer's state: :mod:`.optimizer_bytes`
    activations kept for backward passes by layers and final norm, for all microbatches in flight, and activations that
                one layer recomputes: :mod:`.activation_bytes`
    backward    gradients of activations, one layer at a time
    gathered    whole weights while they are all-gathered, or copies in the dtype of mixed precision
    exchanged   keys and values of other context-parallel ranks: :mod:`hfscale.plan.context_plan`
    loss        one chunk of logits with its gradient, and the head's gradient before it is stored

These bytes do not all exist at once. A rank needs the maximum over these moments of a step::

    the loss            kept activations of all layers, of final norm and loss; logits and their gradients
    the final norm      kept activations of all layers; gradients in the norm
    the last layer      kept activations of all layers; what the layer recomputes; gradients of its activations
    the first layer     the same as for the last layer, but only the first layer's activations are still kept (two
                        layers' if activations are offloaded)

At each moment, gradients of weights exist too: all of them, or in a step of one microbatch only those computed so far.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, prod
from typing import Any, TypeVar

from ...config.schedules import schedule_of
from ...extensions import provided
from ...plan import ParameterPlan, Plan
from ...plan.columns import aligned
from ...plan.context_plan import exchange_of
from ...plan.cut import Cut, cut_shape
from ...plan.feature_plans import gathered_in_8_bits, offloaded, recomputed, weights_in_8_bits
from ...plan.table import human
from .activation_bytes import (
    Activations,
    activation_bytes,
    around_layers,
    has_head,
    is_matrix,
    trained_names,
)
from .layer_bytes import stream_width, types_of
from .optimizer_bytes import optimizer_bytes
from .situation import Situation

OVERHEAD = 0.3 * 2**30  # memory of libraries and collectives, in addition to torch's tensors
_FRAGMENTS = 1.1  # allocated / used bytes of activations, in the public runs of other code
_DATA = ("dp_shard", "edp_shard")
# Fields of an estimate that are not kinds of bytes on the device.
_BESIDE = (
    "on_host",
    "offloaded",
    "again",
    "apart",
    "notes",
)
_Bytes = TypeVar("_Bytes", int, float)


def likely_bytes(needed: float, activations: float) -> float:
    """Return the bytes that a rank is likely to reserve: those ``needed``, and 10% of the ``activations`` for the
    allocator's fragmentation.
    """
    return needed + (_FRAGMENTS - 1) * activations


@dataclass(frozen=True)
class MemoryEstimate:
    """Hold the estimated bytes of one rank by kind: weights, gradients, activations and so on. ``print`` it for a line
    per kind.
    """

    weights: int  # shards of the model's parameters; bytes and scales of quantized ones
    adapters: int
    gradients: int  # gradients of the parameters that train
    optimizer: int  # the optimizer's state after the first step
    # Kept for backward passes, for all microbatches that are in flight at once.
    activations: int
    backward: int  # gradients of activations, of one layer or the final norm
    gathered: int  # whole weights of one layer and outside layers, if these are sharded
    exchanged: int  # keys and values (or heads) that context-parallel ranks exchange, in one layer
    loss: int  # a chunk of logits with its gradient, and the head's gradient before it is .grad
    on_host: int = 0  # bytes in CPU memory instead; not part of the total
    # bytes of one microbatch's activations that are copied to CPU memory and back
    offloaded: int = 0
    again: int = 0  # most bytes of the activations that one layer recomputes
    apart: int = 0  # bytes that the kinds above count, but that do not exist at the peak
    notes: tuple[str, ...] = ()  # how the bytes were estimated

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes on the device by kind, such as weights, gradients, activations."""
        return {
            kind.name: getattr(self, kind.name) for kind in fields(self) if kind.name not in _BESIDE
        }

    @property
    def total(self) -> int:
        """Sum of the bytes of all kinds: an upper bound of the peak, because different kinds peak at different
        times.
        """
        return sum(self.kinds.values())

    @property
    def needed(self) -> float:
        """Bytes that a rank needs at the peak: tensors that exist at once, and the memory of libraries such as NCCL."""
        return self.total - self.apart + OVERHEAD

    @property
    def likely(self) -> float:
        """Bytes that torch's allocator is likely to reserve on a rank: those needed, and some for fragmentation."""
        return likely_bytes(self.needed, self.activations)

    def __str__(self) -> str:
        rows = [(kind, human(size)) for kind, size in (*self.kinds.items(), ("total", self.total))]
        return "\n".join([*aligned(rows), *self.notes])


def estimate_memory(
    plan: Plan,
    ranks: Mapping[str, int] | None = None,  # coordinates, axis -> rank; 0 by default
    *,
    pp_rank: int = 0,  # pipeline rank
    optimizer: str = "adamw_torch_fused",  # as for create_optimizer
    options: Mapping[str, Any] | None = None,  # optimizer options that change its state
    tokens: int = 2048,  # tokens per microbatch of a batch rank, over its context-parallel ranks
    mixed_precision: str = "no",
    trained: Collection[str]
    | None = None,  # parameters that train; by default adapters, or all but quantized ones
    chunk_rows: int | None = None,  # rows per chunk of the loss; by default a quarter of the tokens
    fused: bool = False,  # whether GPU kernels overwrite logits with their gradient
    apart: bool = False,  # whether no gradients exist before the step's only backward pass
    **further: Any,  # fields of Situation
) -> MemoryEstimate:
    """Estimate the bytes that one rank holds in training: the pipeline rank ``pp_rank``, at the coordinates ``ranks``
    on the other axes.

    ``tokens`` are those of a microbatch, over all context-parallel ranks. ``chunk_rows`` rows of logits exist at once;
    with ``fused``, kernels overwrite them with their gradients. ``apart`` says that no gradients exist before the
    step's only backward pass. ``further`` are fields of :class:`.situation.Situation`.
    """
    here = dict(ranks or {})
    adapters = {adapter.name for adapter in plan.adapters}
    held = [plan.by_name[name] for name in plan.local_names(pp_rank)]
    chosen = frozenset(trained_names(plan) if trained is None else trained)
    training = [planned for planned in held if planned.name in chosen]
    further |= {"mixed": mixed_precision, "trained": chosen}
    situation = Situation(plan.layout.own_tokens(tokens), pp_rank, here, **further)
    of_activations = activation_bytes(plan, situation)
    kept = of_activations.kept
    notes = of_activations.notes
    stacks = [mixture.name for mixture in plan.mixtures]
    state = optimizer_bytes(training, here, optimizer, options, plan.layers, stacks, plan.lookup)
    on_host = state * offloaded(plan).optimizer
    if offloaded(plan).optimizer:
        notes += [
            f"on the host: the optimizer's state of {human(state)}, and two buffers of the largest parameter"
        ]
    trains = sum(weight_bytes(plan, p, here) for p in training)
    older, waiting = _kept_versions(plan, pp_rank)
    estimate = MemoryEstimate(
        weights=sum(weight_bytes(plan, p, here) for p in held if p.name not in adapters)
        + older * trains,
        adapters=sum(weight_bytes(plan, p, here) for p in held if p.name in adapters),
        gradients=waiting * trains + _left_out_bytes(plan, training, here, mixed_precision != "no"),
        optimizer=state - on_host,
        activations=kept + of_activations.behind + of_activations.again,
        backward=max(of_activations.passing, of_activations.in_norm),
        gathered=_gathered(plan, held, situation),
        exchanged=_exchanged(plan, situation, tokens),
        loss=_loss(plan, situation, chunk_rows or ceil(situation.tokens / 4), fused),
        on_host=of_activations.on_host + on_host,
        offloaded=of_activations.offloaded,
        again=of_activations.again,
        notes=tuple(notes),
    )
    estimate = replace(
        estimate,
        apart=_bytes_not_at_once(
            plan, situation, of_activations, estimate, training if apart else []
        ),
    )
    if not offloaded(plan).parameters:
        return estimate
    shards = ("weights", "adapters", "gradients", "optimizer")
    away = sum(estimate.kinds[kind] for kind in shards)
    notes += [f"on the host: shards, gradients and optimizer of {human(away)}"]
    return replace(
        estimate,
        **dict.fromkeys(shards, 0),
        on_host=estimate.on_host + away,
        notes=tuple(notes),
    )


def most_at_once(
    kept: _Bytes, loss: _Bytes, running: _Bytes, first: _Bytes, gradients: _Bytes
) -> _Bytes:
    """Return the most bytes that exist at one of three moments of a step.

    The moments are: everything ``kept`` plus the ``loss``; everything ``kept`` plus the last layer's backward pass
    (``running``); the ``first`` layer's backward pass plus the ``gradients`` of later layers.
    """
    return max(kept + max(loss, running), first + gradients)


def _bytes_not_at_once(
    plan: Plan,
    situation: Situation,
    found: Activations,
    all_kinds: MemoryEstimate,
    training: Iterable[ParameterPlan],
) -> int:
    """Return how many of the estimated bytes ``all_kinds`` do not exist at the peak. Before the step, the parameters in
    ``training`` have no gradients.
    """
    made = [] if offloaded(plan).parameters else training
    sizes = {planned.name: weight_bytes(plan, planned, situation.ranks) for planned in made}
    tables, (first, last) = (
        _looked_up(plan, situation.pp_rank),
        (plan.layers[:1], plan.layers[-1:]),
    )
    later = {name for name in sizes if name in tables or (found.on_host and name.startswith(first))}
    behind = sum(sizes.get(name, 0) for name in around_layers(plan) if name not in tables)
    if recomputed(plan).tile:  # the backward pass of every tile adds to its layer's gradients
        behind += sum(size for name, size in sizes.items() if name.startswith(last))
    running = found.again + found.passing
    most = most_at_once(
        found.kept,
        found.behind + all_kinds.loss,
        max(found.in_norm, running) + behind,
        found.last + running,
        sum(size for name, size in sizes.items() if name not in later),
    )
    return all_kinds.activations + all_kinds.backward + all_kinds.loss + sum(sizes.values()) - most


def _looked_up(plan: Plan, pp_rank: int) -> set[str]:
    """Return the names of the matrices outside the layers that are looked up by index, such as the token embedding: all
    except the head's weight.
    """
    head = plan.by_name.get(f"{plan.head}.weight") if has_head(plan, pp_rank) else None
    multiplied = {head.first_name} if head is not None else set[str]()
    return {name for name in around_layers(plan) if is_matrix(plan, name)} - multiplied


def _kept_versions(plan: Plan, pp_rank: int) -> tuple[int, int]:
    """Return how many older versions of trained weights, and how many sets of gradients, the pipeline schedule makes
    the rank keep.
    """
    return schedule_of(plan.layout.pipeline_schedule).kept(plan.layout.pp, pp_rank)


def _left_out_bytes(
    plan: Plan, training: Iterable[ParameterPlan], ranks: dict[str, int], mixed: bool
) -> int:
    """Return the bytes of the compression errors that gradient compression keeps on a rank for the next step, in at
    least 32 bits.
    """
    compressor = provided("gradient_compressions", str(plan.layout.gradient_compression))
    if compressor is None:
        return 0
    total = 0
    rank = int(plan.layout.powersgd_rank or 1)
    for planned in training:
        spread = any(cut.axis == "ep" for cut in planned.cuts)
        if plan.layout.size("edp_replicate" if spread else "dp_replicate") > 1:
            size = _padded(planned.shape, planned.cuts, ranks)
            wide = 4 if mixed else max(4, planned.dtype.itemsize)
            total += wide * compressor.entries_kept(size, rank)
    return total


def weight_bytes(
    plan: Plan,
    planned: ParameterPlan,
    ranks: dict[str, int],
    axes: Collection[str] = (),
) -> int:
    """Return the bytes of a parameter's shard on the rank at ``ranks``, as if it were not sharded over ``axes``. Data
    ranks pad their shards to equal sizes.
    """
    cuts = [cut for cut in planned.cuts if cut.axis not in axes]
    quantized = plan.quantized
    if quantized is not None and planned.name in quantized.weights:
        shards = prod(cut.size for cut in planned.cuts if cut.axis in axes)
        sharded = plan.layout.data_world > 1
        own = _padded(planned.shape, planned.cuts, ranks) if sharded else planned.local_shape(ranks)
        return shards * quantized.bytes_of(planned.name, own, sharded)
    return prod(_padded(planned.shape, cuts, ranks)) * planned.dtype.itemsize


def _padded(
    shape: Sequence[int],
    cuts: Sequence[Cut],
    ranks: dict[str, int],
) -> tuple[int, ...]:
    return cut_shape(
        shape,
        cuts,
        {axis: rank for axis, rank in ranks.items() if axis not in _DATA},
    )


def _copied(plan: Plan, held: Sequence[ParameterPlan], situation: Situation) -> int:
    """Return the bytes of the 16-bit copies of 32-bit parameters that exist at once under mixed precision; microbatches
    that use the same version of the weights share a copy.
    """
    all_cast = situation.mixed == "bf16_params"
    looked_up = _looked_up(plan, situation.pp_rank)
    quantized = frozenset(plan.quantized_weights)
    # Copies in 8 bits are made in each pass, so no copy is kept.
    left = quantized if all_cast else looked_up | quantized | weights_in_8_bits(plan)
    copied = [
        p
        for p in held
        if (all_cast or len(p.shape) > 1) and p.dtype.itemsize == 4 and p.name not in left
    ]
    mixtures = tuple(f"{mixture.name}." for mixture in plan.mixtures)
    versions = 1 + _kept_versions(plan, situation.pp_rank)[0]
    total = 0
    for planned in copied:
        count = situation.held_by(planned.stage)
        # Stacked experts that the plan does not describe are cast by transformers, again in every pass.
        if all_cast or len(planned.shape) == 2 or planned.name.startswith(mixtures):
            count = min(count, versions)
        total += 2 * prod(planned.local_shape(situation.ranks)) * count
    return total


def _is_read_in_place(plan: Plan, planned: ParameterPlan, cast: bool) -> bool:
    """Return whether a rank computes with a parameter's stored tensor itself, because it is neither gathered nor cast
    nor in CPU memory.
    """
    moved = planned.data_cuts or offloaded(plan).parameters
    return not (moved or (cast and planned.dtype.itemsize != 2))


def _gathered(plan: Plan, held: Sequence[ParameterPlan], situation: Situation) -> int:
    """Return the bytes of gathered or cast weights that exist at once: those outside the layers, and those of the
    largest layer (of all layers if they are kept for a whole step). Weights that are neither gathered nor cast are not
    counted.
    """
    layout = plan.layout
    mixed = situation.mixed != "no"
    if layout.data_world == 1:
        return _copied(plan, held, situation) if mixed else 0
    by_layer = Counter[str]()
    eight = gathered_in_8_bits(plan)
    for planned in held:
        layer = next((name for name in plan.layers if planned.name.startswith(f"{name}.")), "")
        size = weight_bytes(plan, planned, situation.ranks, _DATA)
        cast = mixed and planned.name not in plan.quantized_weights
        if _is_read_in_place(plan, planned, cast):
            continue
        if cast:
            size = size * (1 if planned.name in eight else 2) // planned.dtype.itemsize
        by_layer[layer] += size
    root = by_layer.pop("", 0)
    keeps = layout.dp_shard == 1 or (layout.pp > 1 and not layout.weights_regather)
    layers = by_layer.values()
    return root + (sum(layers) if keeps else max(layers, default=0))


def _exchanged(plan: Plan, situation: Situation, tokens: int) -> int:
    """Return the bytes of the keys and values, or heads, that context-parallel ranks exchange in one layer. Projections
    without LLaMA's names are assumed to be as wide as the hidden states.
    """
    if not plan.layers:
        return 0
    size = types_of(plan, situation.mixed).size
    layer = next(
        (name for name in plan.layers if plan.is_local(situation.pp_rank, name)),
        plan.layers[0],
    )
    wide = stream_width(plan, layer)
    projections = {
        name: plan.by_name.get(f"{layer}.self_attn.{name}_proj.weight") for name in ("q", "k", "v")
    }
    q, k, v = (
        wide if projection is None else projection.model_shape(situation.ranks)[0]
        for projection in projections.values()
    )
    return ceil(exchange_of(plan).held(size * (k + v), size * q, tokens, situation.tokens))


def _loss(plan: Plan, situation: Situation, chunk_rows: int, fused: bool) -> int:
    if not has_head(plan, situation.pp_rank):
        return 0
    weight = plan.by_name[f"{plan.head}.weight"]
    owner = weight.first_name
    whole = weight.model_shape(situation.ranks)
    wide = max(4, weight.dtype.itemsize)
    gradient = wide * prod(whole) if owner in situation.trained else 0
    logits = types_of(plan, situation.mixed).size if fused else 2 * wide
    return logits * chunk_rows * whole[0] + gradient
