"""Find the modules around the layers of a model: before the first, after the last, and read by all."""

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
    """Hold the names of modules and parameters around the layers, and what the modules return."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    shared: tuple[str, ...]  # what all layers read
    everywhere: tuple[str, ...]
    returns: int | None  # a layer, where item_returns does not say otherwise
    item_returns: Mapping[str, int | None]
    # Layer -> what is where that layer is.
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    loans: tuple[
        Loan, ...
    ] = ()  # what every stage with layers of a list holds of the list's first layer

    def beside_all(self, layers: Sequence[str]) -> list[str]:
        """Return the modules and parameters outside the layers that the stage of these layers holds."""
        items = [item for layer in layers for item in self.beside.get(layer, ())]
        lists = {layer.rpartition(".")[0] for layer in layers}
        borrowed = (
            loan for loan in self.loans if loan.layer_list in lists and loan.lender not in layers
        )
        return items + [loan.name for loan in borrowed]


def stage_problem(draft: Draft, what: str, instead: str = "pp_size=1") -> None:
    """Record why a model cannot be cut into stages."""
    draft.problem(
        f"pp_size={draft.layout.pp} does not fit {type(draft.model).__name__}: {what}: use {instead}"
    )


@dataclass(frozen=True)
class LayersSeen:
    """Hold the trace of a run through a list of layers: the attributes of a probe in :mod:`hfscale.extras.proofs`."""

    phases: Mapping[str, set[str]]
    returns: int | None
    item_returns: Mapping[str, int | None]
    obstacles: Sequence[str]
    shared: set[str]


def see_passage(draft: Draft, layer_list: str, items: Iterable[str]) -> LayersSeen | None:
    """Trace a run of the model, or of a tiny clone where its code reads values; ``None`` where neither can be."""
    facts = ask("passage", draft.model, layer_list, layer_list=layer_list, items=list(items))
    if failure := facts["failure"]:
        stage_problem(
            draft, f"it cannot be traced, so what comes before its layers is unknown ({failure})"
        )
        return None
    phases = {item: set(names) for item, names in facts["phases"].items()}
    return LayersSeen(
        phases, facts["returns"], facts["item_returns"], facts["obstacles"], set(facts["shared"])
    )


def note_obstacles(
    draft: Draft, layer_list: str, seen: LayersSeen, read: Collection[str] = ()
) -> tuple[Loan, ...]:
    """Report obstacles between layers, and inputs that they ``read``; return what the first layer can lend instead."""
    loan = find_loan(draft.model, layer_list) if GIVEN in seen.obstacles else None
    for obstacle in seen.obstacles:
        if obstacle != GIVEN or loan is None:
            stage_problem(draft, obstacle)
    if read:
        stage_problem(draft, f"its layers read {', '.join(sorted(read))}{ALONE}")
    return (loan,) if loan is not None else ()


def trace(draft: Draft, layer_list: str) -> StageInputs | None:
    """Classify the modules and parameters around one list of layers."""
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
    """Report token embeddings read by all layers of a multimodal model: pictures are on the first stage only."""
    embedding = input_embedding(draft.model)
    if draft.feature(TowersPlan) is not None and any(
        draft.modules.get(item) is embedding for item in shared
    ):
        stage_problem(
            draft, f"all of its layers read what goes into the first, pictures included{ALONE}"
        )


def _phases(
    draft: Draft,
    seen: LayersSeen,
    item: str,
    tensors: dict[str, set[int]],
) -> set[str]:
    """Return when ``item`` is used; report a problem if it can be neither on one stage nor on all."""
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
    elif not phases:  # a second name for what is used under another one
        twin = next(other for other in seen.phases if held & tensors.get(other, set()))
        return seen.phases[twin]
    return phases


def find_stacks(draft: Draft, lists: list[str]) -> TwoStacks | None:
    """Return the two stacks of an encoder-decoder; report a problem and return ``None`` where they cannot be cut."""
    model: Any = draft.model
    encoder = _name(draft, getattr(model, "get_encoder", lambda: None)())
    decoder = _name(draft, getattr(model, "get_decoder", lambda: None)())
    if len(lists) != 2 or encoder is None or decoder is None:
        named = ", ".join(lists) or "none"
        what = f"an encoder-decoder is cut where its encoder and its decoder have a list of layers each ({named})"
        stage_problem(draft, what)
    elif not (lists[0].startswith(f"{encoder}.") and lists[1].startswith(f"{decoder}.")):
        stage_problem(
            draft,
            f"its lists of layers ({', '.join(lists)}) are not those of its encoder and its decoder",
        )
    elif getattr(model, "main_input_name", "input_ids") != "input_ids":
        stage_problem(
            draft,
            f"its encoder reads {model.main_input_name}, and stages of encoder-decoders read tokens",
        )
    elif first_count(text_config(draft.config), EXPERT_FIELDS):
        stage_problem(
            draft, "its encoder returns what its routers say besides, and only hidden states travel"
        )
    elif draft.layout.sequence_parallel:
        stage_problem(
            draft, "sequence_parallel cuts one stream, and two travel", "sequence_parallel=False"
        )
    else:
        return TwoStacks(encoder, decoder, f"{lists[1]}.0")
    return None


def trace_stacks(draft: Draft, lists: list[str], stacks: TwoStacks) -> StageInputs | None:
    """Return the modules around the layers of both stacks; ``None`` and problems where they cannot be cut.

    The rule of one list holds for each: the encoder's last norm is on the stage of its last layer, the decoder's
    embedding on that of the decoder's first, and a stage of the decoder needs of the encoder only what it made.
    """
    model = draft.model
    # Around either list is the other stack as a whole.
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

    # Second names, of the table that both stacks share, are where it is used first.
    names = tuple(item for item in held if held[item] and not phases[item])
    # Of the encoder.
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
    """Trace a run through both lists, and the loans of their first layers; ``None`` where they cannot be cut."""
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
    """Note a problem where an item cannot be on one stage."""
    if "between" in phases:
        stage_problem(draft, f"{item} is used between layers, so every stage would need it")
    elif not phases and not held[item] <= {
        tensor for other in held if other != item for tensor in held[other]
    }:
        stage_problem(draft, f"{item} has no part in a pass over tokens, so it belongs to no stage")


def _name(draft: Draft, module: Any) -> str | None:
    return next((name for name, other in draft.modules.items() if other is module and name), None)
