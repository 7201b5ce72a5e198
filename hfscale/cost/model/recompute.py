"""What the layers of a rank keep, and which of them to compute again so that they keep less: no run.

Of a layer that is recomputed the input is kept, and all that it would keep while its own backward pass runs::

    kept        sum over layers of   alive x tokens x (input where recomputed, else all)   +   tokens x the largest
                                                                                     of those recomputed, but its input
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from ...errors import ConfigError
from ...plan.compress import BYTES, compressed
from ...plan.context import ContextPlan
from ...plan.plan import Plan
from ...plan.recompute import recomputed
from ...plan.table import human
from .layer_bytes import LayerBytes, Types, layer_bytes
from .measured_layers import MeasuredLayers


@dataclass(frozen=True)
class Situation:
    """What a plan does not know of a run.

    Attributes:
        tokens: of one microbatch on one rank.
        alive: for each pipeline stage, how many microbatches it holds at once; 1 where it is not said.
        mixed: whether 16 bits compute over weights of another type.
        trained: names of the parameters that train.
        routes: how many experts a token is sent to; ``None``: all.
        all_recomputed: whether all layers are recomputed, whatever the plan says.
        chosen: which are, under a budget, where that is known.
        measured: what the model's own layers were seen to keep, where no formula says it.
        sequence: tokens of a sequence, which scores of eager attention are kept for; 0: all tokens are one.
    """

    tokens: int
    alive: tuple[int, ...] = ()
    mixed: bool = False
    trained: frozenset[str] = frozenset()
    routes: int | None = None
    all_recomputed: bool = False
    chosen: frozenset[str] | None = None
    measured: MeasuredLayers | None = None
    sequence: int = 0


@dataclass(frozen=True)
class LayerHeld:
    """A layer on a rank.

    Attributes:
        bytes: what it keeps of one token.
        alive: microbatches whose backward pass it waits for at once.
        again: what it keeps beside its input while it is computed again, as it is.
    """

    name: str
    bytes: LayerBytes
    alive: int
    again: float


def layers_recomputed(plan: Plan, ranks: dict[str, int], situation: Situation) -> frozenset[str]:
    """Names of the layers of which the input alone is kept, of those of the rank at ``ranks`` at least."""
    if situation.all_recomputed:
        return frozenset(plan.layers)
    if recomputed(plan).budget is None:
        return frozenset(recomputed(plan).layers)
    if situation.chosen is not None:
        return situation.chosen
    return layers_to_recompute(plan, ranks.get("pp", 0), situation)


def layers_to_recompute(plan: Plan, pp_rank: int, situation: Situation) -> frozenset[str]:
    """As few layers of a pipeline rank as bring what its layers keep below the plan's budget, the cheapest to compute
    for a byte that they save first. All ranks of a stage come to the same answer.

    Args:
        situation: of the rank that has most tokens.

    Raises:
        ConfigError: recomputing all of them is not enough.
    """
    planned, tokens = recomputed(plan), situation.tokens
    assert planned.budget is not None
    held = layers_held(plan, {"pp": pp_rank}, situation)
    chosen = set[str]()

    def kept() -> float:
        total = sum(each.alive * (each.bytes.stream if each.name in chosen else each.bytes.kept) for each in held)
        return tokens * (total + max((each.again for each in held if each.name in chosen), default=0.0))

    def cost(each: LayerHeld) -> float:
        return _flops(plan, each.name, situation) / max(each.bytes.kept - each.bytes.stream, 1e-9)

    for each in sorted((each for each in held if each.name in planned.layers), key=cost):
        if kept() <= planned.budget:
            break
        chosen.add(each.name)
    if kept() > planned.budget:
        raise ConfigError(
            f"recompute='{human(planned.budget)}' cannot be kept with {tokens:,} tokens in a microbatch: recomputing "
            f"all {len(held)} layers of this rank still keeps {human(round(kept()))}: use smaller microbatches, more "
            "ranks, or a larger budget"
        )
    return frozenset(chosen)


def layers_held(plan: Plan, ranks: dict[str, int], situation: Situation) -> list[LayerHeld]:
    """Every layer of the rank at ``ranks``, in order."""
    plain = types_of(plan, situation.mixed)
    found = []
    for _, alive, layers in stages_held(plan, ranks, situation):
        for name in layers:
            whole = _layer(plan, name, ranks, plain, situation)
            if compressed(plan) is None:
                found.append(LayerHeld(name, whole, alive, whole.kept - whole.as_input))
            else:  # what is computed again keeps it as it is, and reads a copy of the input
                held = _layer(plan, name, ranks, replace(plain, kept=BYTES), situation)
                found.append(LayerHeld(name, replace(held, again=whole.again), alive, whole.kept))
    return found


def stages_held(plan: Plan, ranks: dict[str, int], situation: Situation) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Of every stage of the rank at ``ranks``: its number, the microbatches alive, its layers."""
    places = [(0, plan.layers)]
    if plan.stages is not None:
        places = [(stage.index, stage.layers) for stage in plan.stages.of_rank(ranks.get("pp", 0))]
    for index, layers in places:
        yield index, situation.alive[index] if index < len(situation.alive) else 1, tuple(layers)


def types_of(plan: Plan, mixed: bool) -> Types:
    """In what the plan's model computes, and its adapters."""
    widest = max((p.dtype for p in plan.owned() if p.dtype.is_floating_point), key=size_of, default=torch.float32)
    model = next((p.dtype for p in plan.owned() if p.name.startswith(plan.layers[:1])), widest)
    if mixed and plan.layout.data_world > 1:
        return Types(2, 2)
    size = size_of(model)
    own = max((size_of(plan.by_name[a.name].dtype) for a in plan.adapters), default=size)
    if mixed and size == 4:  # autocast leaves 64 bits alone, and 16 are what it computes in
        return Types(2, 2, autocasts=size)
    return Types(size, own)


def size_of(dtype: torch.dtype) -> int:
    """Bytes of a value."""
    return dtype.itemsize


def _layer(plan: Plan, layer: str, ranks: dict[str, int], types: Types, situation: Situation) -> LayerBytes:
    measured = situation.measured
    if measured is not None and types.kept is not None:
        measured = measured.in_8_bits
    seen = None if measured is None else measured.of_layer(plan, layer)
    if seen is not None:
        return seen
    trained, first = situation.trained, layer == plan.layers[0]
    if first:  # of a layer behind it the input needs a gradient
        looked_up = (name for name in around_layers(plan) if is_matrix(plan, name) and name != f"{plan.head}.weight")
        first = not any(name in trained for name in looked_up)
    length = situation.sequence or situation.tokens
    found = layer_bytes(plan, layer, ranks, types, trained, routes=situation.routes, first=first, length=length)
    context = plan.feature(ContextPlan)
    if context is not None and any(name.startswith(f"{layer}.") for name in context.whole):
        return replace(found, kept=found.kept * plan.layout.cp, as_input=0.0)
    return found


def around_layers(plan: Plan) -> list[str]:
    """Names of the parameters around the layers."""
    inside = tuple(f"{layer}." for layer in plan.layers)
    return [planned.name for planned in plan.owned() if not planned.name.startswith(inside)]


def trained_names(plan: Plan) -> frozenset[str]:
    """Names of the parameters that train unless somebody says otherwise: adapters, or all that is not quantized."""
    adapters = frozenset(adapter.name for adapter in plan.adapters)
    quantized = frozenset(plan.quantized.weights) if plan.quantized is not None else frozenset[str]()
    return adapters or frozenset(p.name for p in plan.owned()) - quantized


def is_matrix(plan: Plan, name: str) -> bool:
    """Whether a parameter has rows and columns."""
    return len(plan.by_name[name].shape) > 1


def _flops(plan: Plan, layer: str, situation: Situation) -> float:
    """Of a forward pass of one token: two for each entry of a matrix that it meets."""
    total = 0.0
    for planned in plan.owned():
        if planned.name.startswith(f"{layer}.") and len(planned.shape) > 1:
            count = next((e.count for e in plan.mixtures if planned.name.startswith(f"{e.name}.")), None)
            share = 1.0 if count is None else min(situation.routes or count, count) / count
            total += 2 * share * prod(planned.shape)
    return total
