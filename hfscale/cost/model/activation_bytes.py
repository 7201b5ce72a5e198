"""Compute the activation bytes of a rank from a plan, and choose the layers to recompute under a memory budget.

A recomputed layer keeps its input; during its own backward pass, it also keeps all activations that an unrecomputed
layer keeps. The names on the left are the fields of :class:`Activations`::

    kept        activations from the forward pass to the backward pass, summed over layers:
                    microbatches in flight x tokens x (the layer's input if it is recomputed, else all its activations)
                also those of modules before the layers, and the hidden states that stages receive and send
    behind      activations that the final norm and the loss keep
    again       activations of the largest recomputed layer, without its input: they exist while it is recomputed
    passing     gradients of a layer's activations during its backward pass
    in_norm     bytes in the final norm's backward pass: six values of at least 32 bits per hidden unit
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from ...errors import ConfigError
from ...plan import Plan
from ...plan.feature_plans import (
    BYTES,
    compressed,
    heads_with_scores,
    offloaded,
    recomputed,
)
from ...plan.table import human
from .layer_bytes import layer_bytes, sequence_ranks, stream_width, types_of
from .situation import LayerBytes, Situation, Types


@dataclass(frozen=True)
class LayerHeld:
    """Hold the activation bytes of one layer on one rank: those kept from the forward to the backward pass, and those
    that exist only while the layer is recomputed.
    """

    name: str
    bytes: LayerBytes  # bytes per token
    in_flight: int  # microbatches that wait for their backward pass at once
    again: float  # bytes in addition to its input while it is recomputed

    def kept(self, chosen: Collection[str]) -> float:
        """Return the bytes per token that the layer keeps between a microbatch's forward and backward pass: those of
        its input if it is one of the recomputed layers (``chosen``), otherwise of all its activations.
        """
        return self.bytes.stream if self.name in chosen else self.bytes.kept


@dataclass(frozen=True)
class Activations:
    """Hold the activation bytes of a rank: those kept from the forward to the backward pass, by the layers (``kept``)
    and by final norm and loss (``behind``), and those that exist only in a backward pass.
    """

    kept: int
    behind: int
    again: int
    passing: int
    in_norm: int
    # Bytes of ``kept`` that exist during the backward pass of the first layer, which is the last one to run.
    last: int
    on_host: int
    offloaded: int  # bytes of ``on_host`` of one microbatch
    notes: list[str]


def activation_bytes(plan: Plan, situation: Situation) -> Activations:
    """Compute the activation bytes of a rank: those that layers, final norm and loss keep from the forward to the
    backward pass, and those that exist only in a backward pass.
    """
    held = layers_held(plan, situation)
    types = types_of(plan, situation.mixed)
    chosen = frozenset(plan.layers if situation.all_recomputed else recomputed(plan).layers)
    if recomputed(plan).budget is not None and not situation.all_recomputed:
        chosen = (
            layers_to_recompute(plan, situation) if situation.chosen is None else situation.chosen
        )
    tokens = situation.tokens
    total = sum(layer.in_flight * tokens * layer.kept(chosen) for layer in held)
    away = 0
    one = 0
    notes = list[str]()
    if offloaded(plan).activations is not None:
        one = ceil(sum(tokens * layer.kept(chosen) for layer in held))
        away = ceil(total)
        total = _beside_host(held, chosen, tokens)
        notes = [
            f"on the host: {human(away)} of activations; at most two layers' are on the device"
        ]
    total += _border_bytes(plan, situation, types, held, chosen)
    last = total if away or not held else tokens * held[0].kept(chosen)
    before, behind, in_norm = _around_layers(plan, situation, types)
    again = max((layer.again for layer in held if layer.name in chosen), default=0.0)
    again += max((layer.bytes.again for layer in held), default=0.0)
    passing = max((layer.bytes.passing for layer in held), default=0.0)
    notes += _notes(plan, situation, held, chosen)
    again = ceil(tokens * again)
    passing = ceil(tokens * passing)
    return Activations(
        ceil(total + before),
        ceil(behind),
        again,
        passing,
        ceil(in_norm),
        ceil(last + before),
        away,
        one,
        notes,
    )


def _notes(
    plan: Plan, situation: Situation, held: Sequence[LayerHeld], chosen: frozenset[str]
) -> list[str]:
    again = recomputed(plan)
    counted = all(layer.bytes.counted for layer in held)
    how = (
        "counted for this kind of layer"
        if counted
        else "an upper estimate from the shapes of the layers"
    )
    scores = "scores of attention are not kept"
    if counted and situation.measured is not None:
        how = "counted on the model's own layers"
        scores = "fused attention keeps no scores"
    if heads := heads_with_scores(plan):
        scores = f"eager attention keeps scores of {heads} heads over sequences of {situation.length:,} tokens"
    notes = [f"activations: {how}, of {situation.tokens:,} tokens a microbatch; {scores}"]
    if compressed(plan) is not None:
        notes.append("what layers keep is counted in 8 bits")
    if again.keep:
        notes.append("results of operators that recomputed layers keep are not counted")
    if not again.tile and any(
        not counted or not name.endswith((".self_attn", ".mlp")) for name in again.modules
    ):
        notes.append("what modules that are recomputed by themselves do not keep is not deducted")
    if chosen:
        share = f"{sum(layer.name in chosen for layer in held)} of {len(held)} layers"
        notes.append(f"recomputed: {share}, of which the input is kept, and one of them whole")
    return notes


def _around_layers(plan: Plan, situation: Situation, types: Types) -> tuple[float, float, float]:
    """Return three numbers of activation bytes outside the layers: kept before the first layer, kept after the last
    layer, and needed during the final norm's backward pass.
    """
    before = 0.0
    behind = 0.0
    in_norm = 0.0
    seen = situation.measured
    for index, in_flight, _ in _stages(plan, situation):
        one = in_flight * situation.tokens
        if seen is not None:
            before += one * (seen.shared + seen.before * (index == 0))
        if plan.stages is None or index == len(plan.stages.stages) - 1:
            kept, in_norm = (
                _bytes_behind_layers(plan, types, situation.trained)
                if seen is None
                else (seen.behind, 0.0)
            )
            behind = behind + one * kept
            in_norm = situation.tokens * in_norm
    return before, behind, in_norm


def _bytes_behind_layers(
    plan: Plan,
    types: Types,
    trained: Collection[str],
) -> tuple[float, float]:
    """Return two numbers of bytes per token: kept by the final norm and the loss, and needed during the norm's backward
    pass (0 if the norm is recomputed).
    """
    if not plan.layers:
        return 0.0, 0.0
    width = stream_width(plan, plan.layers[-1])
    norms = [
        name
        for name in around_layers(plan)
        if not is_matrix(plan, name) and name.endswith("weight")
    ]
    again = recomputed(plan).modules
    wide = max(4, types.size)
    whole = [name for name in norms if name.rpartition(".")[0] not in again]
    normed = types.stream * (len(norms) - len(whole)) + sum(
        wide + types.stream * (name in trained) for name in whole
    )
    return width * (normed / sequence_ranks(plan) + types.stream), width * 6 * wide * bool(
        whole
    ) / sequence_ranks(plan)


def _border_bytes(
    plan: Plan,
    situation: Situation,
    types: Types,
    held: Sequence[LayerHeld],
    chosen: frozenset[str],
) -> float:
    """Return the bytes of the hidden states that this rank receives from other pipeline ranks and sends to them. An
    input that the first layer of a stage keeps as an activation is not counted again.
    """
    # exact bytes include a layer's input
    as_they_are = set[str]()
    measured = situation.measured is not None
    if offloaded(plan).activations is None and compressed(plan) is None:
        as_they_are = {
            e.name for e in held if measured or not e.bytes.counted or e.bytes.as_input
        } | chosen
    total = 0.0
    stages = {index: (in_flight, names) for index, in_flight, names in _stages(plan, situation)}
    for index, (in_flight, names) in stages.items():
        if names and plan.stages is not None:
            sends = index < len(plan.stages.stages) - 1 and index + 1 not in stages
            given = index > 0 and names[0] not in as_they_are
            stream = types.stream * stream_width(plan, names[0]) / sequence_ranks(plan)
            total += in_flight * situation.tokens * stream * (sends + given)
    return total


def _beside_host(held: Sequence[LayerHeld], chosen: frozenset[str], tokens: int) -> float:
    """Return the most bytes of activations that are on the device at once, if activations are offloaded: about two
    layers' in the backward pass.
    """
    pieces = (
        tokens * (layer.bytes.stream if layer.name in chosen else layer.bytes.piece)
        for layer in held
    )
    # with three or more layers, two full layers count
    read = max(pieces, default=0.0) if len(held) < 3 else 0.0
    most = max((tokens * layer.kept(chosen) for layer in held), default=0.0)
    return min(2, len(held) - 1) * most + read


def layers_to_recompute(plan: Plan, situation: Situation) -> frozenset[str]:
    """Choose the layers of a pipeline rank to recompute: as few as needed to keep the activations below the memory
    budget, beginning with the layers that need the fewest FLOPs per saved byte.
    """
    planned = recomputed(plan)
    tokens = situation.tokens
    assert planned.budget is not None
    held = layers_held(plan, situation)
    chosen = set[str]()

    def kept() -> float:
        total = sum(layer.in_flight * layer.kept(chosen) for layer in held)
        return tokens * (
            total + max((layer.again for layer in held if layer.name in chosen), default=0.0)
        )

    def cost(each: LayerHeld) -> float:
        return _flops(plan, each.name, situation) / max(each.bytes.kept - each.bytes.stream, 1e-9)

    for layer in sorted((layer for layer in held if layer.name in planned.layers), key=cost):
        if kept() <= planned.budget:
            break
        chosen.add(layer.name)
    if kept() > planned.budget:
        raise ConfigError(
            f"recompute='{human(planned.budget)}' is too small for {tokens:,} tokens in a microbatch: recomputing all "
            f"{len(held)} layers of this rank still keeps {human(round(kept()))} of activations: use smaller "
            "microbatches, more ranks, or a larger budget"
        )
    return frozenset(chosen)


def layers_held(plan: Plan, situation: Situation) -> list[LayerHeld]:
    """Return the activation bytes of each layer on this rank, in the layers' order."""
    plain = types_of(plan, situation.mixed)
    held_layers = []
    for _, in_flight, layers in _stages(plan, situation):
        for name in layers:
            whole = _layer(plan, name, plain, situation)
            if compressed(plan) is None:
                held_layers.append(LayerHeld(name, whole, in_flight, whole.kept - whole.as_input))
            else:  # recomputed layers keep unrounded values and a copy of the input; gradients are unrounded
                held = _layer(plan, name, replace(plain, kept=BYTES), situation)
                exact = replace(held, again=whole.again, passing=whole.passing)
                held_layers.append(LayerHeld(name, exact, in_flight, whole.kept))
    return held_layers


def _stages(plan: Plan, situation: Situation) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Yield, for each stage on this pipeline rank, its index, the number of its microbatches in flight, and the names
    of its layers.
    """
    places = [(0, plan.layers)]
    if plan.stages is not None:
        places = [(stage.index, stage.layers) for stage in plan.stages.of_rank(situation.pp_rank)]
    for index, layers in places:
        yield index, situation.held_by(index), tuple(layers)


def _layer(plan: Plan, layer: str, types: Types, situation: Situation) -> LayerBytes:
    measured = situation.measured
    if measured is not None and types.kept is not None:
        measured = measured.in_8_bits
    seen = None if measured is None else measured.of_layer(plan, layer)
    if seen is not None:
        return seen
    first = layer == plan.layers[0]
    if first:  # later layers' inputs need a gradient
        looked_up = (
            name
            for name in around_layers(plan)
            if is_matrix(plan, name) and name != f"{plan.head}.weight"
        )
        first = not any(name in situation.trained for name in looked_up)
    size = layer_bytes(plan, layer, situation, types, first=first)
    if any(name.startswith(f"{layer}.") for name in plan.run_whole):
        return replace(size, kept=plan.layout.of_full_sequences(size.kept), as_input=0.0)
    return size


def around_layers(plan: Plan) -> list[str]:
    """Return the names of the model's parameters that are not in its layers: embeddings, final norm, head."""
    inside = tuple(f"{layer}." for layer in plan.layers)
    return [planned.name for planned in plan.owned() if not planned.name.startswith(inside)]


def trained_names(plan: Plan) -> frozenset[str]:
    """Return the names of the parameters that train if the user chooses none: those of the adapters if the model has
    adapters, otherwise all parameters that are not quantized.
    """
    adapters = frozenset(adapter.name for adapter in plan.adapters)
    return adapters or frozenset(p.name for p in plan.owned()) - set(plan.quantized_weights)


def has_head(plan: Plan, rank: int) -> bool:
    """Return whether the pipeline rank ``rank`` holds the head of the language model."""
    return plan.head is not None and plan.is_local(rank, plan.head)


def is_matrix(plan: Plan, name: str) -> bool:
    """Return whether a parameter has two or more dims."""
    return len(plan.by_name[name].shape) > 1


def _flops(plan: Plan, layer: str, situation: Situation) -> float:
    """Return the FLOPs of a layer's forward pass per token: two per entry of each matrix that a token uses."""
    total = 0.0
    for planned in plan.owned():
        if planned.name.startswith(f"{layer}.") and len(planned.shape) > 1:
            count = next(
                (e.count for e in plan.mixtures if planned.name.startswith(f"{e.name}.")), None
            )
            share = 1.0 if count is None else min(situation.routes or count, count) / count
            total += 2 * share * prod(planned.shape)
    return total
