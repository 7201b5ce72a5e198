"""From candidates to a proved blueprint."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ....families.blueprint import INFERRED, Block, Blueprint
from ....families.inference import Inference, Proof
from .candidates import Candidate, find_candidates
from .dropout import find_dropouts
from .forward_trace import Trace, trace
from .hypotheses import Guesses, head_count, key_head_count
from .proof import prove
from .subject import Subject, Unproved, aside, brief, make_subject, refuse

_MOST_TRIALS = 120  # hypotheses per candidate


@dataclass
class _Search:
    subject: Subject
    traced: Trace
    layers: str
    refused: list[str] = field(default_factory=list)

    def blueprint(self, blocks: dict[str, Block]) -> Blueprint:
        return Blueprint(self.layers, blocks)

    def is_local(self, path: str, block: Block, tp_size: int = 2) -> Proof | None:
        try:
            return prove(self.subject, self.blueprint({path: block}), tp_size)
        except Unproved:
            return None

    def find(self, candidate: Candidate) -> Block | None:
        """The first hypothesis that holds, its edges as near to the block as they can be."""
        guesses = Guesses(self.subject, self.traced, candidate)
        reason, found, tried = "", None, 0
        for block in guesses.insides():
            tried += 1
            try:
                prove(self.subject, self.blueprint({candidate.path: block}))
            except Unproved as unproved:
                reason = reason or str(unproved)
                if tried < _MOST_TRIALS:
                    continue
                break
            found = block
            break
        if found is None:
            self.refused.append(f"{candidate}: {tried} hypotheses tried; the first: {reason}")
            return None
        found = next((block for block in guesses.edges(found) if self.is_local(candidate.path, block)), found)
        heads, key_heads = head_count(self.subject.model.config), key_head_count(self.subject.model.config)
        if candidate.attends and key_heads < heads and not self.is_local(candidate.path, found, 2 * key_heads):
            # Several ranks cannot hold the same key/value head here: more ranks than such heads will be refused.
            found = next((b for b in (replace(found, key_value={}),) if self.is_local(candidate.path, b)), found)
        return found


def infer(model: Any) -> Inference:
    """Derive the blueprint of a model from its modules and a traced forward of a tiny clone, and prove it.

    The same model gives the same answer in every process; no random stream is moved.

    Raises:
        PlanError: nothing in it could be proved; says what was tried.
    """
    try:
        subject = make_subject(model)
        with aside():
            return _infer(model, subject)
    except Unproved as unproved:
        raise refuse(model, str(unproved)) from unproved
    except Exception as error:  # foreign code runs in all of this
        raise refuse(model, f"its clone cannot be judged: {brief(error)}") from error


def _infer(model: Any, subject: Subject) -> Inference:
    base = getattr(model, "base_model", model)
    layers = subject.layers.removeprefix("" if base is model else f"{model.base_model_prefix}.")
    try:
        traced = trace(subject)
    except Exception as error:  # foreign code may not bear being watched
        raise Unproved(f"its clone cannot be traced: {brief(error)}") from error
    candidates, passed = find_candidates(subject, traced)
    _check_layer_kinds(model, subject)
    search = _Search(subject, traced, layers, passed)
    found = [(candidate, block) for candidate in candidates if (block := search.find(candidate)) is not None]
    blocks, attention = _together(search, found)
    for other in _other_subjects(model, subject):
        blocks = _that_hold(search, other, blocks)
    if not blocks:
        raise Unproved("; ".join(search.refused) or "no projection of its layers writes what the next layer reads")
    fields = find_dropouts(model, blocks, subject)
    blocks = {path: replace(block, dropout=fields.get(path, ())) for path, block in blocks.items()}
    blueprint = search.blueprint(blocks)
    proof = prove(subject, blueprint)
    source = f"{INFERRED}, and proved on a tiny clone (worst relative difference {proof.worst:.0e})"
    blueprint = replace(blueprint, source=source)
    return Inference(blueprint, proof, tuple(path for path in blocks if path in attention), tuple(search.refused))


def _together(search: _Search, found: Iterable[tuple[Candidate, Block]]) -> tuple[dict[str, Block], set[str]]:
    """All blocks at once; those of one path made one."""
    blocks: dict[str, Block] = {}
    attention = set()
    for candidate, block in found:
        path = candidate.path
        union = _union(blocks[path], block) if path in blocks else block
        try:
            prove(search.subject, search.blueprint({**blocks, path: union}))
        except Unproved as unproved:
            search.refused.append(f"{candidate}: beside the others, {unproved}")
            continue
        blocks[path] = union
        if candidate.attends:
            attention.add(path)
    return blocks, attention


def _union(first: Block, second: Block) -> Block:
    """Two sets of roles in modules of one path: in different layers, or side by side in one."""
    listed = ("column", "row", "enter", "leave", "shared", "across", "sample_heads", "local_attributes", "local_config")
    joined: dict[str, Any] = {
        name: tuple(dict.fromkeys(getattr(first, name) + getattr(second, name))) for name in listed
    }
    for name in ("parts", "cut", "heads"):
        joined[name] = {**getattr(first, name), **getattr(second, name)}
    return replace(
        first,
        **joined,
        own_heads=first.own_heads or second.own_heads,
        rest_shared=first.rest_shared or second.rest_shared,
        optional=first.optional or second.optional or first.enter == second.enter == ("",),
    )


def _other_subjects(model: Any, subject: Subject) -> Iterable[Subject]:
    """Clones of other sizes, so that nothing holds by coincidence: odd widths of the MLP."""
    fields = subject.model.config.to_dict()
    odd = {name: value + 1 for name, value in fields.items() if type(value) is int and value in (48, 24)}
    if odd:
        try:
            yield make_subject(model, **odd)
        except Unproved:  # some sizes are tied to others
            return


def _that_hold(search: _Search, other: Subject, blocks: dict[str, Block]) -> dict[str, Block]:
    try:
        prove(other, search.blueprint(blocks))
        return blocks
    except Unproved:
        kept = {}
    for path, block in blocks.items():
        try:
            prove(other, search.blueprint({path: block}))
            kept[path] = block
        except Unproved as unproved:
            search.refused.append(f"{path or 'the layer'}: with odd widths, {unproved}")
    return kept


def _check_layer_kinds(model: Any, subject: Subject) -> None:
    """Refuse a model with layers that the clone has none of: nothing about them is proved."""
    shown = {_kind_of_layer(subject.model.get_submodule(name)) for name in subject.layer_names}
    for name, layer in model.get_submodule(subject.layers).named_children():
        missing = _kind_of_layer(layer)
        if missing not in shown:
            nearest = min(shown, key=lambda kind: len(kind ^ missing))
            different = ", ".join(sorted(f"{path or 'the layer'}: {kind}" for path, kind in missing - nearest)[:3])
            raise Unproved(f"layer {name} is of a kind that the tiny clone does not show ({different})")


def _kind_of_layer(layer: Any) -> frozenset[tuple[str, str]]:
    """Its modules by path and class; numbers in paths count for one, as lists may be of other lengths."""
    return frozenset(
        (".".join("*" if part.isdigit() else part for part in name.split(".")), type(module).__name__)
        for name, module in layer.named_modules()
    )
