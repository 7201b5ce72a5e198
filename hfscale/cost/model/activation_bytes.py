"""What a rank keeps for backward passes: of its layers, around them, and at the ends of its stages."""

from collections.abc import Collection, Sequence
from math import ceil

from ...plan.compress import compressed
from ...plan.offload import offloaded
from ...plan.plan import Plan
from ...plan.recompute import recomputed
from ...plan.scores import heads_with_scores
from ...plan.table import human
from .layer_bytes import Types, stream_width
from .recompute import (
    LayerHeld,
    Situation,
    around_layers,
    is_matrix,
    layers_held,
    layers_recomputed,
    stages_held,
    types_of,
)


def activation_bytes(plan: Plan, here: dict[str, int], situation: Situation, mixed: bool) -> tuple[int, int, list[str]]:
    """On the device and on the host, and what is to be said of them."""
    held, types = layers_held(plan, here, situation), types_of(plan, mixed)
    chosen = layers_recomputed(plan, here, situation)
    tokens, total = situation.tokens, 0.0
    for each in held:
        total += each.alive * tokens * (each.bytes.stream if each.name in chosen else each.bytes.kept)
    away, notes_of_host = 0, list[str]()
    if offloaded(plan).activations is not None:
        total, away = _on_host(held, chosen, tokens)
        notes_of_host = [f"on the host: {human(away)} of activations; at most two layers' are on the device"]
    total += _around_layers(plan, here, situation, types)
    total += _at_ends(plan, here, situation, types, _keep_inputs(plan, situation, held, chosen))
    total += tokens * max((each.again for each in held if each.name in chosen), default=0.0)
    total += tokens * max((each.bytes.again for each in held), default=0.0)
    return ceil(total), away, [*notes_of_host, *_notes(plan, situation, held, chosen)]


def _notes(plan: Plan, situation: Situation, held: Sequence[LayerHeld], chosen: frozenset[str]) -> list[str]:
    """What is to be said of what layers keep."""
    again, counted = recomputed(plan), all(each.bytes.counted for each in held)
    how = "counted for this kind of layer" if counted else "an upper estimate from the shapes of the layers"
    scores = "scores of attention are not kept"
    if counted and situation.measured is not None:
        how, scores = "counted on the model's own layers", "fused attention keeps no scores"
    if heads := heads_with_scores(plan):
        length = situation.sequence or situation.tokens
        scores = f"eager attention keeps scores of {heads} heads over sequences of {length:,} tokens"
    notes = [f"activations: {how}, of {situation.tokens:,} tokens a microbatch; {scores}"]
    if compressed(plan) is not None:
        notes.append("what layers keep is counted in 8 bits")
    if again.keep:
        notes.append("results of operators that recomputed layers keep are not counted")
    if any(not counted or not name.endswith((".self_attn", ".mlp")) for name in again.modules):
        notes.append("what modules that are recomputed by themselves do not keep is not deducted")
    if chosen:
        notes.append(
            f"recomputed: {len(chosen)} of {len(held)} layers, of which the input is kept, and one of them whole"
        )
    return notes


def _around_layers(plan: Plan, ranks: dict[str, int], situation: Situation, types: Types) -> float:
    """What lies in front of the layers and behind them."""
    total, seen = 0.0, situation.measured
    for index, alive, _ in stages_held(plan, ranks, situation):
        one = alive * situation.tokens
        if seen is not None:
            total += one * (seen.shared + seen.before * (index == 0))
        if plan.stages is None or index == len(plan.stages.stages) - 1:
            total += one * (_around(plan, types, situation.trained) if seen is None else seen.behind)
    return total


def _at_ends(
    plan: Plan, ranks: dict[str, int], situation: Situation, types: Types, as_they_are: Collection[str]
) -> float:
    """What stages were sent and have sent, which stays until the gradient is there.

    What was sent to a stage of the same rank is one with what that was sent, and that is one with what its first layer
    keeps.

    Args:
        as_they_are: layers that keep their input as it is.
    """
    total, stages = 0.0, {index: (alive, names) for index, alive, names in stages_held(plan, ranks, situation)}
    for index, (alive, names) in stages.items():
        if names and plan.stages is not None:
            sends = index < len(plan.stages.stages) - 1 and index + 1 not in stages
            given = index > 0 and names[0] not in as_they_are
            stream = types.stream * stream_width(plan, names[0]) / _sequence(plan)
            total += alive * situation.tokens * stream * (sends + given)
    return total


def _keep_inputs(plan: Plan, situation: Situation, held: Sequence[LayerHeld], chosen: frozenset[str]) -> set[str]:
    """Layers that keep their input as it is; where there is no formula it is in what they keep."""
    if offloaded(plan).activations is not None or compressed(plan) is not None:
        return set()
    formula = situation.measured is None
    return {
        each.name for each in held if each.name in chosen or each.bytes.as_input or not (formula and each.bytes.counted)
    }


def _on_host(held: Sequence[LayerHeld], chosen: frozenset[str], tokens: int) -> tuple[float, int]:
    """What is on the device while its backward pass runs, and what waits on the host.

    That is a layer, read piece by piece as the first of a backward pass is, but whole where another came before it, and
    the one that is fetched meanwhile.
    """
    one = [tokens * (each.bytes.stream if each.name in chosen else each.bytes.kept) for each in held]
    layers = sum(each.alive * size for each, size in zip(held, one, strict=True))
    pieces = (tokens * (each.bytes.stream if each.name in chosen else each.bytes.piece) for each in held)
    read = max(pieces, default=0.0) if len(held) < 3 else 0.0  # of three, two are there whole later
    return min(2, len(held) - 1) * max(one, default=0.0) + read, ceil(layers)


def _around(plan: Plan, types: Types, trained: Collection[str]) -> float:
    """What the final norm and the loss keep of one token: the norm's input twice, and the gradient by its output."""
    if not plan.layers:
        return 0.0
    width = stream_width(plan, plan.layers[-1])
    norms = [name for name in around_layers(plan) if not is_matrix(plan, name) and name.endswith("weight")]
    normed = sum(max(4, types.size) + types.stream * (name in trained) for name in norms)
    return width * (normed / _sequence(plan) + types.stream)


def _sequence(plan: Plan) -> int:
    """Over how many tensor ranks the hidden states between blocks are cut."""
    return plan.layout.tp if plan.sequence_regions else 1
