"""What a rank holds while it trains, from a plan: integers in, bytes out; no weights, no run.

::

    weights     what the plan leaves of every parameter on the rank; of a quantized one, packed bytes and scales; under
                a schedule without a flush older versions of what trains
    adapters    likewise of adapters
    gradients   of what trains
    optimizer   its state: :mod:`.optimizer_bytes`
    activations what layers and final norm keep for backward passes, of all microbatches alive: :mod:`.activation_bytes`
    gathered    whole weights while the data axes have them gathered, or copies in the type of mixed precision
    exchanged   what context ranks hold of one another's keys and values: :mod:`.cp_buffers`
    loss        one chunk of logits with its gradient, and the head's gradient on its way
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, prod
from typing import Any

from ...config.schedules import ASYNCHRONOUS
from ...plan.cut import Cut, cut_shape
from ...plan.float8 import float8_weights, gathered_in_8_bits
from ...plan.offload import offloaded
from ...plan.parameter import ParameterPlan
from ...plan.plan import Plan
from ...plan.quantized import BLOCK, OUTER_BLOCK, packed_scale_bytes
from ...plan.table import human
from .activation_bytes import activation_bytes
from .cp_buffers import cp_buffer_bytes
from .gradient_bytes import left_out_bytes
from .layer_bytes import stream_width
from .measured_layers import MeasuredLayers
from .optimizer_bytes import optimizer_bytes
from .recompute import (
    Situation,
    around_layers,
    is_matrix,
    size_of,
    trained_names,
    types_of,
)

_DATA = ("dp_shard", "edp_shard")
_CODE = 4 * 16  # bytes of the table of 4-bit values, one per weight
_OUTER_CODE = 4 * 256


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by kind; ``print`` it for one line per kind.

    Attributes:
        weights: the model's parameters; packed bytes and scales of quantized ones.
        adapters: the parameters of adapters.
        gradients: of the parameters that train.
        optimizer: the optimizer's state, once there has been a step.
        activations: what is kept for the backward pass, of all microbatches that are alive at once.
        gathered: whole weights of one layer and of what is around the layers, where data ranks shard them.
        exchanged: keys and values of other context ranks, or what attention sends of its own, of one layer at a time.
        loss: one chunk of logits with its gradient, and the head's gradient before it is ``.grad``.
        on_host: what lies on the host instead; no part of :attr:`total`.
        notes: what of this is estimated, and how.
    """

    weights: int
    adapters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    exchanged: int
    loss: int
    on_host: int = 0
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind, on the device."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("on_host", "notes")}

    @property
    def total(self) -> int:
        """All of it: an upper estimate of the peak, which not all kinds reach at the same time."""
        return sum(self.kinds.values())

    def __str__(self) -> str:
        rows = [*self.kinds.items(), ("total", self.total)]
        names, sizes = [name for name, _ in rows], [human(size) for _, size in rows]
        width, right = max(map(len, names)), max(map(len, sizes))
        lines = [f"{name.ljust(width)}  {size.rjust(right)}" for name, size in zip(names, sizes, strict=True)]
        return "\n".join([*lines, *self.notes])


def estimate_memory(
    plan: Plan,
    ranks: Mapping[str, int] | None = None,
    *,
    optimizer: str = "adamw_torch_fused",
    options: Mapping[str, Any] | None = None,
    tokens: int = 2048,
    alive: Sequence[int] = (),
    checkpointing: bool = False,
    recomputed_layers: frozenset[str] | None = None,
    mixed_precision: str = "no",
    trained: Collection[str] | None = None,
    routes: int | None = None,
    chunk_rows: int | None = None,
    measured: MeasuredLayers | None = None,
    sequence_length: int | None = None,
) -> MemoryEstimate:
    """What the rank at ``ranks`` holds.

    Args:
        ranks: its coordinates, axis -> rank; those left out are 0.
        optimizer: a name that :func:`hfscale.create_optimizer` knows.
        options: those that change its state: ``momentum``, ``amsgrad``, ``min_8bit_size``, ``stochastic_rounding``.
        tokens: tokens of one microbatch of one batch rank, over all of its sequences; context ranks share them.
        alive: for each pipeline stage, how many microbatches it holds at once; 1 by default.
        checkpointing: whether all layers are recomputed in the backward pass, whatever the plan says.
        recomputed_layers: which are, where a budget was given and that is known; else what the plan says.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp8"``.
        trained: names of the parameters that train; by default the adapters, or else all that is not quantized.
        routes: how many experts a token is sent to; all of them, where it is not known.
        chunk_rows: rows of one chunk of the loss; by default a quarter of the tokens.
        measured: what the model's own layers were seen to keep on a rank of this layout, where no formula says it.
        sequence_length: tokens of one sequence, for scores of eager attention; by default all tokens are one.

    Raises:
        ConfigError: the optimizer is unknown.
    """
    here, adapters = dict(ranks or {}), {adapter.name for adapter in plan.adapters}
    held = [plan.by_name[name] for name in plan.local_names(here.get("pp", 0))]
    chosen = trained_names(plan) if trained is None else trained
    training = [planned for planned in held if planned.name in chosen]
    mixed, own_tokens = mixed_precision != "no", ceil(tokens / plan.layout.cp)
    again = checkpointing, recomputed_layers, measured, sequence_length or 0
    situation = Situation(own_tokens, tuple(alive), mixed, frozenset(chosen), routes, *again)
    kept, away, notes = activation_bytes(plan, here, situation, mixed)
    state, moved, more = _optimizer(plan, training, here, optimizer, options)
    trains, (older, waiting) = sum(weight_bytes(plan, p, here) for p in training), _under_way(plan, here)
    found = MemoryEstimate(
        weights=sum(weight_bytes(plan, p, here) for p in held if p.name not in adapters) + older * trains,
        adapters=sum(weight_bytes(plan, p, here) for p in held if p.name in adapters),
        gradients=waiting * trains + left_out_bytes(plan, training, here, mixed),
        optimizer=state,
        activations=kept,
        gathered=_gathered(plan, here, held, mixed, alive),
        exchanged=_exchanged(plan, here, situation, tokens),
        loss=_loss(plan, here, chosen, chunk_rows or ceil(situation.tokens / 4)),
        on_host=away + moved,
        notes=(*notes, *more),
    )
    return _without_shards(found) if offloaded(plan).parameters else found


def _under_way(plan: Plan, ranks: dict[str, int]) -> tuple[int, int]:
    """How many older versions of what trains there are between steps, and how many gradients of it.

    PipeDream stashes the weights of every microbatch under way. In 2BW that is one version on all stages but the last,
    and gradients of a step wait for the end of the next one (Narayanan et al. 2019, 2021).
    """
    layout, schedule = plan.layout, plan.layout.pipeline_schedule
    if layout.pp == 1 or schedule not in ASYNCHRONOUS:
        return 0, 1
    behind = layout.pp - 1 - ranks.get("pp", 0)
    return (behind, 1) if schedule == "pipedream" else (min(behind, 1), 2)


def _without_shards(found: MemoryEstimate) -> MemoryEstimate:
    """What is left on the device where shards lie on the host."""
    away = found.weights + found.adapters + found.gradients + found.optimizer
    note = f"on the host: shards, gradients and optimizer of {human(away)}"
    none = dict.fromkeys(("weights", "adapters", "gradients", "optimizer"), 0)
    return replace(found, **none, on_host=found.on_host + away, notes=(*found.notes, note))


def _optimizer(
    plan: Plan, training: list[ParameterPlan], ranks: dict[str, int], name: str, options: Mapping[str, Any] | None
) -> tuple[int, int, list[str]]:
    """Bytes of its state on the device and on the host, and what is to be said of them."""
    state = optimizer_bytes(training, ranks, name, options, plan.layers)
    if not offloaded(plan).optimizer:
        return state, 0, []
    return 0, state, [f"on the host: the optimizer's state of {human(state)}, and its copies of the largest parameter"]


def weight_bytes(plan: Plan, planned: ParameterPlan, ranks: dict[str, int], axes: Collection[str] = ()) -> int:
    """Bytes of one parameter on the rank at ``ranks``, as if it were whole over ``axes``.

    Data ranks have shards of one size: the last ones are padded.
    """
    cuts = [cut for cut in planned.cuts if cut.axis not in axes]
    if plan.quantized is not None and planned.name in plan.quantized.weights:
        shards = prod(cut.size for cut in planned.cuts if cut.axis in axes)
        return shards * _quantized_bytes(plan, planned, ranks)
    return prod(_padded(planned.shape, cuts, ranks)) * planned.dtype.itemsize


def _padded(shape: Sequence[int], cuts: Sequence[Cut], ranks: dict[str, int]) -> tuple[int, ...]:
    return cut_shape(shape, cuts, {axis: rank for axis, rank in ranks.items() if axis not in _DATA})


def _quantized_bytes(plan: Plan, planned: ParameterPlan, ranks: dict[str, int]) -> int:
    """Packed bytes and scales of this rank's share, which data ranks hold in rows of one size."""
    assert plan.quantized is not None
    transposed, double = planned.name in plan.quantized.transposed, plan.quantized.double
    sharded = plan.layout.data_world > 1
    local = _padded(planned.shape, planned.cuts, ranks) if sharded else planned.local_shape(ranks)
    matrices, values = prod(local[:-2]), prod(local[-2:])
    if plan.quantized.bits == 8:
        return values + 4 * local[-1 if transposed else -2]
    blocks = ceil(values / BLOCK)
    if sharded or len(local) == 3:  # bytes that hfscale packs
        return matrices * (blocks * BLOCK // 2 + packed_scale_bytes(blocks, double))
    # scales, their scales, their mean, a table
    outer = blocks + 4 * ceil(blocks / OUTER_BLOCK) + 4 + _OUTER_CODE
    return ceil(values / 2) + (outer if double else 4 * blocks) + _CODE


def _copied(plan: Plan, ranks: dict[str, int], held: Sequence[ParameterPlan], alive: Sequence[int]) -> int:
    """Autocast's copies of matrices of 32 bits, one for all microbatches that compute with the same weights."""
    here = plan.head is not None and plan.is_local(ranks.get("pp", 0), plan.head)
    head = plan.by_name.get(f"{plan.head}.weight") if here else None
    multiplied = {head.tied_to or head.name} if head is not None else set[str]()
    looked_up = {name for name in around_layers(plan) if is_matrix(plan, name)} - multiplied
    packed = frozenset(plan.quantized.weights) if plan.quantized is not None else frozenset[str]()
    left = looked_up | packed | float8_weights(plan)  # what is in 8 bits for a product is made again
    copied = [p for p in held if len(p.shape) > 1 and size_of(p.dtype) == 4 and p.name not in left]
    return sum(2 * prod(p.local_shape(ranks)) * _copies(plan, p, alive) for p in copied)


def _copies(plan: Plan, planned: ParameterPlan, alive: Sequence[int]) -> int:
    """Of how many versions of a weight microbatches are under way, or, where each has its own, how many those are."""
    count = alive[planned.stage] if planned.stage < len(alive) else 1
    if len(planned.shape) > 2 and not planned.name.startswith(tuple(f"{each.name}." for each in plan.mixtures)):
        return count  # stacked weights of a mixture that nobody described, which the host casts in every pass
    most = {"pipedream": count, "pipedream_2bw": 2}.get(str(plan.layout.pipeline_schedule), 1)
    return min(count, most)


def _gathered(
    plan: Plan, ranks: dict[str, int], held: Sequence[ParameterPlan], mixed: bool, alive: Sequence[int]
) -> int:
    """Whole weights of the largest layer and of all that is around the layers; all layers where none is given up."""
    layout = plan.layout
    if layout.data_world == 1:
        return _copied(plan, ranks, held, alive) if mixed else 0
    by_layer, eight = dict[str, int](), gathered_in_8_bits(plan)
    for planned in held:
        layer = next((name for name in plan.layers if planned.name.startswith(f"{name}.")), "")
        size = weight_bytes(plan, planned, ranks, _DATA)
        packed = plan.quantized is not None and planned.name in plan.quantized.weights
        if mixed and not packed:
            size = size * (1 if planned.name in eight else 2) // planned.dtype.itemsize
        by_layer[layer] = by_layer.get(layer, 0) + size
    root = by_layer.pop("", 0)
    keeps = layout.dp_shard == 1 or (layout.pp > 1 and not layout.weights_regather)
    layers = by_layer.values()
    return root + (sum(layers) if keeps else max(layers, default=0))


def _exchanged(plan: Plan, ranks: dict[str, int], situation: Situation, tokens: int) -> int:
    """Of a layer whose projections have LLaMA's names, or as wide as the hidden states where they have not."""
    if not plan.layers or plan.layout.cp == 1:
        return 0
    size = types_of(plan, situation.mixed).size
    layer = next((name for name in plan.layers if plan.is_local(ranks.get("pp", 0), name)), plan.layers[0])
    wide = stream_width(plan, layer)
    found = {name: plan.by_name.get(f"{layer}.self_attn.{name}_proj.weight") for name in ("q", "k", "v")}
    q, k, v = (wide if each is None else each.model_shape(ranks)[0] for each in found.values())
    return ceil(cp_buffer_bytes(plan, size * (k + v), size * q, tokens, situation.tokens))


def _loss(plan: Plan, ranks: dict[str, int], trained: Collection[str], chunk_rows: int) -> int:
    if plan.head is None or not plan.is_local(ranks.get("pp", 0), plan.head):
        return 0
    weight = plan.by_name[f"{plan.head}.weight"]
    owner = weight.tied_to or weight.name
    whole = weight.model_shape(ranks)
    wide = max(4, size_of(weight.dtype))
    gradient = wide * prod(whole) if owner in trained else 0
    return 2 * wide * chunk_rows * whole[0] + gradient
