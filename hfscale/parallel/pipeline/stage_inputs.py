"""Find the modules outside the layers of a model: those used before the first layer, those used after the last, and
those that all layers read.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._compat.transformers.classes import input_embedding
from ...models.facts import ask
from ...models.fields import first_count, text_config
from ...models.module_kinds import EXPERT_FIELDS
from ...plan.drafting.boundary_modules import ALONE, GIVEN, find_loan, items_around, tensors_of
from ...plan.drafting.draft import Draft
from ...plan.feature_plans import TowersPlan
from ...plan.stages import Loan, TwoStacks


@dataclass(frozen=True)
class StageInputs:
    """Hold the names of modules and parameters outside the layers, and what the modules return.

    What a module returns is written as ``None`` for a single tensor, and as ``n`` for a tuple of ``n`` entries whose
    first is the tensor.
    """

    before: tuple[str, ...]  # used before the first layer
    after: tuple[str, ...]  # used after the last layer
    shared: tuple[str, ...]  # their outputs are read by all layers
    everywhere: tuple[str, ...]  # without tensors, so every stage can have them
    returns: int | None  # the form of a layer's output, if ``item_returns`` has no entry
    item_returns: Mapping[str, int | None]  # module -> the form of its output
    # layer -> modules and parameters that must be on the stage of this layer
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    loans: tuple[
        Loan, ...
    ] = ()  # modules of a layer list's first layer that every stage with layers of the list also holds

    def beside_all(self, layers: Sequence[str]) -> list[str]:
        """Return the names of the modules and parameters, other than its layers, that a stage with ``layers`` holds
        because these layers need them.
        """
        items = [item for layer in layers for item in self.beside.get(layer, ())]
        lists = {layer.rpartition(".")[0] for layer in layers}
        borrowed = (
            loan for loan in self.loans if loan.layer_list in lists and loan.lender not in layers
        )
        return items + [loan.name for loan in borrowed]


def stage_problem(draft: Draft, what: str, instead: str = "pp_size=1") -> None:
    """Record the reason ``what`` why a model cannot be divided into stages, and what to use ``instead``."""
    draft.problem(
        f"pp_size={draft.layout.pp} does not fit {type(draft.model).__name__}: {what}: use {instead}"
    )


@dataclass(frozen=True)
class LayersSeen:
    """Record in which part of a forward pass modules and parameters were used: before, between or after the layers of a
    list.

    Fields are those of a probe in :mod:`hfscale.extras.proofs`.
    """

    phases: Mapping[str, set[str]]
    returns: int | None
    item_returns: Mapping[str, int | None]
    obstacles: Sequence[str]
    shared: set[str]


def see_passage(draft: Draft, layer_list: str, items: Iterable[str]) -> LayersSeen | None:
    """Trace a forward pass through the layers of ``layer_list``, and return when each of ``items`` (modules,
    parameters) is used.

    The pass is one of the model itself or, if the model's code reads values of tensors, of a tiny copy of the model. If
    neither can be traced, record a problem and return ``None``.
    """
    facts = ask("passage", draft.model, layer_list, layer_list=layer_list, items=list(items))
    if failure := facts["failure"]:
        stage_problem(
            draft, f"it cannot be traced, so the modules before its layers are unknown ({failure})"
        )
        return None
    phases = {item: set(names) for item, names in facts["phases"].items()}
    return LayersSeen(
        phases, facts["returns"], facts["item_returns"], facts["obstacles"], set(facts["shared"])
    )


def note_obstacles(
    draft: Draft, layer_list: str, seen: LayersSeen, read: Collection[str] = ()
) -> tuple[Loan, ...]:
    """Record as problems what keeps a list of layers from being divided into stages: the obstacles that a trace has
    found, and the modules that all layers ``read``.

    If an obstacle is that all layers need the result of one module of the first layer, and every stage can hold this
    module as a tied tensor, return the module as a :class:`Loan` in place of this problem.
    """
    loan = find_loan(draft.model, layer_list) if GIVEN in seen.obstacles else None
    for obstacle in seen.obstacles:
        if obstacle != GIVEN or loan is None:
            stage_problem(draft, obstacle)
    if read:
        stage_problem(draft, f"its layers read {', '.join(sorted(read))}{ALONE}")
    return (loan,) if loan is not None else ()


def trace(draft: Draft, layer_list: str) -> StageInputs | None:
    """Find out which modules and parameters outside one list of layers are used before, after or by the layers.

    If this fails, record problems and return ``None``.
    """
    added = [] if draft.added is None else [draft.added.name]
    around = (item for item in items_around(draft.model, layer_list) if item not in added)
    tensors = {item: set(tensors_of(draft.model, item)) for item in around}
    seen = see_passage(draft, layer_list, tensors)
    if seen is None:
        return None
    loans = note_obstacles(draft, layer_list, seen)
    _refuse_shared_pictures(draft, seen.shared)
    placed = {item: _phases(draft, seen, item, tensors) for item, held in tensors.items() if held}
    if draft.problems:
        return None
    used = {item: order for order, item in enumerate(seen.phases)}
    ordered = sorted(placed, key=lambda item: used.get(item, len(used)))
    return StageInputs(
        before=tuple(
            item for item in ordered if "before" in placed[item] and item not in seen.shared
        ),
        after=(*(item for item in ordered if "after" in placed[item]), *added),
        shared=tuple(item for item in ordered if item in seen.shared),
        everywhere=tuple(item for item, held in tensors.items() if not held),
        returns=seen.returns,
        item_returns=seen.item_returns,
        loans=loans,
    )


def _refuse_shared_pictures(draft: Draft, shared: set[str]) -> None:
    """Record a problem if all layers of a multimodal model read the input embeddings of the tokens.

    The embeddings contain images, which only the first stage has.
    """
    embedding = input_embedding(draft.model)
    if draft.feature(TowersPlan) is not None and any(
        draft.modules.get(item) is embedding for item in shared
    ):
        stage_problem(
            draft, f"all of its layers read the input of the first layer, images included{ALONE}"
        )


def _phases(
    draft: Draft,
    seen: LayersSeen,
    item: str,
    tensors: dict[str, set[int]],
) -> set[str]:
    """Return when ``item``, a module or parameter, is used in a forward pass: before, between or after the layers.

    Record a problem if ``item`` can be neither on one stage nor on all stages.
    """
    phases = seen.phases.get(item, set())
    held = tensors[item]
    towers = draft.feature(TowersPlan)
    reached = {tensor for used in seen.phases for tensor in tensors.get(used, ())}
    if "between" in phases:
        stage_problem(draft, f"{item} is used between layers, so every stage would need it")
    elif not phases and towers is not None and towers.holds(item):
        return {"before"}
    elif not phases and not held <= reached:
        stage_problem(draft, f"{item} has no part in a pass over tokens, so it belongs to no stage")
    elif seen.item_returns.get(item) == 0:
        stage_problem(draft, f"{item} returns neither a tensor nor a tuple that begins with one")
    # the item is a second name of a module or parameter that is used under another name
    elif not phases:
        twin = next(other for other in seen.phases if held & tensors.get(other, set()))
        return seen.phases[twin]
    return phases


def find_stacks(draft: Draft, lists: list[str]) -> TwoStacks | None:
    """Return the names of the encoder and of the decoder of an encoder-decoder that can be divided into stages;
    otherwise record a problem and return ``None``.
    """
    model: Any = draft.model
    encoder = _name(draft, getattr(model, "get_encoder", lambda: None)())
    decoder = _name(draft, getattr(model, "get_decoder", lambda: None)())
    if len(lists) != 2 or encoder is None or decoder is None:
        named = ", ".join(lists) or "none"
        what = (
            "stages of an encoder-decoder need one list of layers in its encoder and one in its decoder, got "
            f"{named}"
        )
        stage_problem(draft, what)
    elif not (lists[0].startswith(f"{encoder}.") and lists[1].startswith(f"{decoder}.")):
        stage_problem(
            draft,
            f"its lists of layers ({', '.join(lists)}) are not inside its encoder and its decoder, in this order",
        )
    elif getattr(model, "main_input_name", "input_ids") != "input_ids":
        stage_problem(
            draft,
            f"its encoder reads {model.main_input_name}, but stages of encoder-decoders can only read tokens",
        )
    elif first_count(text_config(draft.config), EXPERT_FIELDS):
        stage_problem(
            draft,
            "its encoder also returns router logits, and only hidden states travel between stages",
        )
    elif draft.layout.sequence_parallel:
        stage_problem(
            draft,
            "sequence_parallel shards the hidden states of one stack, but those of two stacks travel between stages",
            "sequence_parallel=False",
        )
    else:
        return TwoStacks(encoder, decoder, f"{lists[1]}.0")
    return None


def trace_stacks(draft: Draft, lists: list[str], stacks: TwoStacks) -> StageInputs | None:
    """Find out which modules and parameters outside the layers of an encoder-decoder are used before, after or by the
    layers.

    If this fails, record problems and return ``None``. Encoder and decoder follow the rules for one layer list. The
    encoder's last norm is on the stage of the encoder's last layer, the decoder's embedding on the stage of the
    decoder's first layer. A stage of the decoder needs only the encoder's output.
    """
    model = draft.model
    # The modules around one list include the full other stack.
    around_encoder, around = (list(items_around(model, path)) for path in lists)
    of_encoder = [item for item in around_encoder if item.startswith(f"{stacks.encoder}.")]
    probes = _traced_lists(draft, lists, (around_encoder, around), stacks)
    if probes is None:
        return None
    (encoding, decoding), loans = probes
    held = {
        item: set(tensors_of(model, item))
        for item in (*of_encoder, *around)
        if item != stacks.encoder
    }
    phases = {
        item: (encoding if item in of_encoder else decoding).phases.get(item, set())
        for item in held
    }
    for item in filter(held.get, held):
        _check(draft, item, phases[item], held)
    if draft.problems:
        return None

    def placed(phase: str, inside: bool) -> tuple[str, ...]:
        return tuple(
            item
            for item in held
            if held[item] and phase in phases[item] and (item in of_encoder) == inside
        )

    # Unused names are second names of the embedding that both stacks share, which is first used on the first stage.
    names = tuple(item for item in held if held[item] and not phases[item])
    # the layers of the encoder
    layers = [f"{lists[0]}.{number}" for number in range(len(draft.modules[lists[0]]))]
    return StageInputs(
        before=(*placed("before", True), *names),
        after=placed("after", False),
        shared=(),
        everywhere=tuple(item for item in held if not held[item]),
        returns=decoding.returns,
        item_returns={
            **encoding.item_returns,
            **decoding.item_returns,
            **dict.fromkeys(layers, encoding.returns),
        },
        beside={
            layers[-1]: placed("after", True),
            stacks.first: placed("before", False),
        },
        loans=loans,
    )


def _traced_lists(
    draft: Draft, lists: list[str], around: Sequence[list[str]], stacks: TwoStacks
) -> tuple[tuple[LayersSeen, LayersSeen], tuple[Loan, ...]] | None:
    """Trace a forward pass through the layers of the encoder and of the decoder. Return both traces, and the modules of
    a first layer whose results all layers of its list need (loans). Return ``None`` if there are problems.
    """
    encoding, decoding = (
        see_passage(draft, path, items) for path, items in zip(lists, around, strict=True)
    )
    if encoding is None or decoding is None:
        return None
    loans: tuple[Loan, ...] = ()
    for path, probe in zip(lists, (encoding, decoding), strict=True):
        loans += note_obstacles(draft, path, probe, probe.shared - {"", stacks.encoder})
    return None if draft.problems else ((encoding, decoding), loans)


def _check(
    draft: Draft,
    item: str,
    phases: set[str],
    held: Mapping[str, set[int]],
) -> None:
    """Record a problem if ``item``, a module or parameter outside the layers, is used between layers or not at all, and
    so can be on no single stage.
    """
    if "between" in phases:
        stage_problem(draft, f"{item} is used between layers, so every stage would need it")
    elif not phases and not held[item] <= {
        tensor for other in held if other != item for tensor in held[other]
    }:
        stage_problem(draft, f"{item} has no part in a pass over tokens, so it belongs to no stage")


def _name(draft: Draft, module: Any) -> str | None:
    return next((name for name, other in draft.modules.items() if other is module and name), None)
