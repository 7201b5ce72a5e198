"""Cut an encoder-decoder into stages: its encoder's layers and then its decoder's, as one list.

The rule of one list holds for each: what an embedding makes is where the first layer is, what follows the last layer is
where that is. So the encoder's last norm is on the stage of its last layer, the decoder's embedding on that of the
decoder's first, and a stage of the decoder needs of the encoder only what it made, which travels
(:class:`hfscale.plan.stages.TwoStacks`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..families.expert_modules import EXPERT_FIELDS
from ..families.fields import first_count, text_config
from ..plan.loans import Loan
from ..plan.stages import TwoStacks
from ..schedules import ASYNCHRONOUS
from .around import items_around, tensors_of
from .draft import Draft
from .passage import Passage, Seen, note_obstacles, see_passage, stage_problem


def find_stacks(draft: Draft, lists: list[str]) -> TwoStacks | None:
    """The two stacks of an encoder-decoder; where they cannot be cut, ``None`` and a problem that says why."""
    model: Any = draft.model
    encoder = _name(draft, getattr(model, "get_encoder", lambda: None)())
    decoder = _name(draft, getattr(model, "get_decoder", lambda: None)())
    if len(lists) != 2 or encoder is None or decoder is None:
        found = ", ".join(lists) or "none"
        what = f"an encoder-decoder is cut where its encoder and its decoder have a list of layers each ({found})"
        stage_problem(draft, what)
    elif not (lists[0].startswith(f"{encoder}.") and lists[1].startswith(f"{decoder}.")):
        stage_problem(draft, f"its lists of layers ({', '.join(lists)}) are not those of its encoder and its decoder")
    elif getattr(model, "main_input_name", "input_ids") != "input_ids":
        stage_problem(draft, f"its encoder reads {model.main_input_name}, and stages of encoder-decoders read tokens")
    elif first_count(text_config(draft.config), EXPERT_FIELDS):
        stage_problem(draft, "its encoder returns what its routers say besides, and only hidden states travel")
    elif draft.layout.sequence_parallel:
        stage_problem(draft, "sequence_parallel cuts one stream, and two travel", "sequence_parallel=False")
    elif str(draft.layout.pipeline_schedule) in ASYNCHRONOUS:
        schedule = f"pipeline_schedule={draft.layout.pipeline_schedule}"
        stage_problem(draft, f"{schedule} has no flush, and its decoder reads what its encoder makes", "1f1b")
    else:
        return TwoStacks(encoder, decoder, f"{lists[1]}.0")
    return None


def trace_stacks(draft: Draft, lists: list[str], stacks: TwoStacks) -> Passage | None:
    """What lies around the layers of both stacks; ``None`` where they cannot be cut, for reasons that the draft has."""
    model = draft.model
    # Around either list is the other stack as a whole.
    around_encoder, around = (list(items_around(model, path)) for path in lists)
    of_encoder = [item for item in around_encoder if item.startswith(f"{stacks.encoder}.")]
    probes = _probed(draft, lists, (around_encoder, around), stacks)
    if probes is None:
        return None
    (encoding, decoding), loans = probes
    held = {item: set(tensors_of(model, item)) for item in (*of_encoder, *around) if item != stacks.encoder}
    phases = {item: (encoding if item in of_encoder else decoding).phases.get(item, set()) for item in held}
    for item in filter(held.get, held):
        _check(draft, item, phases[item], held)
    if draft.problems:
        return None

    def placed(phase: str, inside: bool) -> tuple[str, ...]:
        return tuple(item for item in held if held[item] and phase in phases[item] and (item in of_encoder) == inside)

    # Second names, of the table that both stacks share, are where it is used first.
    names = tuple(item for item in held if held[item] and not phases[item])
    layers = [f"{lists[0]}.{number}" for number in range(len(draft.modules[lists[0]]))]  # of the encoder
    return Passage(
        before=(*placed("before", True), *names),
        after=placed("after", False),
        shared=(),
        everywhere=tuple(item for item in held if not held[item]),
        returns=decoding.returns,
        item_returns={**encoding.item_returns, **decoding.item_returns, **dict.fromkeys(layers, encoding.returns)},
        beside={layers[-1]: placed("after", True), stacks.first: placed("before", False)},
        loans=loans,
    )


def _probed(
    draft: Draft, lists: list[str], around: Sequence[list[str]], stacks: TwoStacks
) -> tuple[tuple[Seen, Seen], tuple[Loan, ...]] | None:
    """A run through either list, and what its first layer lends; ``None`` where something keeps it from being cut."""
    encoding, decoding = (see_passage(draft, path, items) for path, items in zip(lists, around, strict=True))
    if encoding is None or decoding is None:
        return None
    loans: tuple[Loan, ...] = ()
    for path, probe in zip(lists, (encoding, decoding), strict=True):
        loans += note_obstacles(draft, path, probe, probe.shared - {"", stacks.encoder})
    return None if draft.problems else ((encoding, decoding), loans)


def _check(draft: Draft, item: str, phases: set[str], held: Mapping[str, set[int]]) -> None:
    """Note a problem where an item cannot be on one stage."""
    if "between" in phases:
        stage_problem(draft, f"{item} is used between layers, so every stage would need it")
    elif not phases and not held[item] <= {tensor for other in held if other != item for tensor in held[other]}:
        stage_problem(draft, f"{item} has no part in a pass over tokens, so it belongs to no stage")


def _name(draft: Draft, module: Any) -> str | None:
    return next((name for name, found in draft.modules.items() if found is module and name), None)
