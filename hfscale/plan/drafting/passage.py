"""Find the modules around the layers of a model: before the first, after the last, and read by all."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..._compat.transformers.classes import input_embedding
from ...models.facts import ask
from ..loans import Loan
from ..towers import TowersPlan
from .around import ALONE, GIVEN, items_around, tensors_of
from .draft import Draft
from .loans import find_loan


@dataclass(frozen=True)
class Passage:
    """Hold the names of modules and parameters around the layers, and what the modules return."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    shared: tuple[str, ...]  # what all layers read
    everywhere: tuple[str, ...]
    returns: int | None  # a layer, where item_returns does not say otherwise
    item_returns: Mapping[str, int | None]
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # layer -> what is where that layer is
    loans: tuple[Loan, ...] = ()  # what every stage with layers of a list holds of the list's first layer

    def beside_all(self, layers: Sequence[str]) -> list[str]:
        """Return the modules and parameters that the stage of these layers holds besides them."""
        items = [item for layer in layers for item in self.beside.get(layer, ())]
        lists = {layer.rpartition(".")[0] for layer in layers}
        borrowed = (loan for loan in self.loans if loan.layer_list in lists and loan.lender not in layers)
        return items + [loan.name for loan in borrowed]


def stage_problem(draft: Draft, what: str, instead: str = "pp_size=1") -> None:
    """Note why a model cannot be cut into stages."""
    draft.problem(f"pp_size={draft.layout.pp} does not fit {type(draft.model).__name__}: {what}: use {instead}")


@dataclass(frozen=True)
class Seen:
    """Hold the trace of a run through a list of layers: the attributes of a probe in :mod:`hfscale.testing.proofs`."""

    phases: Mapping[str, set[str]]
    returns: int | None
    item_returns: Mapping[str, int | None]
    obstacles: Sequence[str]
    shared: set[str]


def see_passage(draft: Draft, layer_list: str, items: Iterable[str]) -> Seen | None:
    """Trace a run of the model, or of a tiny clone where its code reads values; ``None`` where neither can be.

    Args:
        items: all that is around the list.
    """
    found = ask("passage", draft.model, layer_list, layer_list=layer_list, items=list(items))
    if failure := found["failure"]:
        stage_problem(draft, f"it cannot be traced, so what comes before its layers is unknown ({failure})")
        return None
    phases = {item: set(names) for item, names in found["phases"].items()}
    return Seen(phases, found["returns"], found["item_returns"], found["obstacles"], set(found["shared"]))


def note_obstacles(draft: Draft, layer_list: str, seen: Seen, read: Collection[str] = ()) -> tuple[Loan, ...]:
    """Report obstacles to running the layers in several processes.

    Args:
        read: modules that layers read, and no stage but one could hold.

    Returns:
        what the layers of every stage need of the first one, so that it does not.
    """
    loan = find_loan(draft.model, layer_list) if GIVEN in seen.obstacles else None
    for obstacle in seen.obstacles:
        if obstacle != GIVEN or loan is None:
            stage_problem(draft, obstacle)
    if read:
        stage_problem(draft, f"its layers read {', '.join(sorted(read))}{ALONE}")
    return (loan,) if loan is not None else ()


def trace(draft: Draft, layer_list: str) -> Passage | None:
    """Find the modules around one list of layers; ``None`` and problems where that fails."""
    tensors = {item: set(tensors_of(draft.model, item)) for item in items_around(draft.model, layer_list)}
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
    return Passage(
        before=tuple(item for item in ordered if "before" in placed[item] and item not in seen.shared),
        after=tuple(item for item in ordered if "after" in placed[item]),
        shared=tuple(item for item in ordered if item in seen.shared),
        everywhere=tuple(item for item, held in tensors.items() if not held),
        returns=seen.returns,
        item_returns=seen.item_returns,
        loans=loans,
    )


def _refuse_shared_pictures(draft: Draft, shared: set[str]) -> None:
    """Report token embeddings read by all layers of a multimodal model: pictures are on the first stage only."""
    embedding = input_embedding(draft.model)
    if draft.feature(TowersPlan) is not None and any(draft.modules.get(item) is embedding for item in shared):
        stage_problem(draft, f"all of its layers read what goes into the first, pictures included{ALONE}")


def _phases(draft: Draft, seen: Seen, item: str, tensors: dict[str, set[int]]) -> set[str]:
    """Return when ``item`` is used; report a problem if it can be neither on one stage nor on all."""
    phases, held, towers = seen.phases.get(item, set()), tensors[item], draft.feature(TowersPlan)
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
