"""Derive a model's blueprint (the tensor-parallel roles of its modules): search candidate blocks for roles that can be
proved, and find the dropout inside these blocks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from ....errors import PlanError
from ....models.blueprint import INFERRED, Block, Blueprint, Inference, Proof, as_data
from ....models.clone import DROPOUT_WORDS, tiny_clone
from ....models.names import wild_name
from ....plan.drafting.layers import base_prefix
from ....plan.parameter import join_path
from .candidate_blocks import CandidateBlock, find_candidates
from .forward_trace import Trace, run_hooked, trace
from .hypotheses import Guesses
from .lockstep import prove
from .subject import Subject, Unplanned, Unproved, aside, brief, make_subject

_MOST_TRIALS = 120  # hypotheses per candidate
_RAISED = (0.5, 1)  # dropout probabilities to try; some configs accept whole numbers only


def prove_blueprint(model: Any) -> tuple[dict[str, Any], bool]:
    """Return the blueprint (the tensor-parallel roles of modules) of a model; if no blueprint can be proved, return the
    reason as ``refused``.
    """
    try:
        return as_data(infer(model)), True
    except PlanError as error:
        return {"refused": str(error)}, True


def prove_completed(
    model: Any,
    blueprint: Blueprint,
    forgotten: list[str],
) -> tuple[bool, bool]:
    """Return whether two ranks of a clone with ``blueprint`` compute the same as one process; the blueprint has been
    completed by roles for the ``forgotten`` parameters, which transformers' TP plan omits.
    """
    try:
        subject = make_subject(model)
        if {wild_name(name) for name in forgotten} - {
            wild_name(name) for name, _ in subject.model.named_parameters()
        }:
            # A user has added these parameters to this model, so a clone of its class proves nothing about them.
            return (
                False,
                True,
            )
        with aside():
            prove(subject, blueprint)
    except Unproved:
        return False, True
    return True, True


def prove_holds(model: Any, blueprint: Blueprint) -> tuple[str | None, bool]:
    """Return the reason why two ranks of a clone with the given blueprint compute something else than one process.
    Return an empty string if they compute the same, and ``None`` if the clone cannot be tested (for example because the
    model reads no tokens).
    """
    groups = max((block.head_groups for block in blueprint.blocks.values()), default=1)
    # Each of the two ranks needs a head of every group.
    changes = {"num_attention_heads": 2 * groups} if groups > 1 else {}
    try:
        subject = make_subject(model, **changes)
    except Unproved:
        return None, True
    try:
        with aside():
            prove(subject, blueprint)
    except Unplanned:
        return None, True
    except Unproved as difference:
        return str(difference), True
    except Exception:  # errors of stock code that runs in the proof
        return None, True
    return "", True


def infer(model: Any) -> Inference:
    """Derive a model's blueprint from a traced tiny clone, and prove it. All processes get the same result, and RNG
    states do not change.
    """
    try:
        subject = make_subject(model)
        with aside():
            return _infer(model, subject)
    except Exception as error:  # of any type: stock code runs here
        reason = (
            str(error)
            if isinstance(error, Unproved)
            else f"a tiny copy of the model cannot be tested: {brief(error)}"
        )
        kind = type(model).__name__
        raise PlanError(
            f"a blueprint of {model.config.model_type!r} could not be inferred from {kind}: {reason}"
        ) from error


@dataclass
class _Search:
    subject: Subject
    traced: Trace
    layers: str
    refused: list[str] = field(default_factory=list)

    def prove(self, blocks: dict[str, Block], tp_size: int = 2) -> Proof:
        return prove(self.subject, Blueprint(self.layers, blocks), tp_size)

    def objection(self, blocks: dict[str, Block], tp_size: int = 2) -> str:
        """Return the reason why a clone whose ``blocks`` are all sharded over ``tp_size`` ranks does not compute the
        same as one process; empty if it does.
        """
        try:
            self.prove(blocks, tp_size)
        except Unproved as unproved:
            return str(unproved)
        return ""

    def find(self, candidate: CandidateBlock) -> Block | None:
        """Return the first hypothesis about the candidate's roles that holds on the clone, with collectives as near to
        the block's entry and exit as possible; ``None`` if no hypothesis holds.
        """
        guesses = Guesses(self.subject, self.traced, candidate)
        path = candidate.path
        first = ""
        for inside in islice(guesses.insides(), _MOST_TRIALS):
            if not (objection := self.objection({path: inside})):
                break
            first = first or objection
        else:
            self.refused.append(
                f"{candidate}: none of the hypotheses tried holds; the first: {first}"
            )
            return None
        inside = next(
            (block for block in guesses.edges(inside) if not self.objection({path: block})), inside
        )
        few_keys = candidate.attends and guesses.key_heads < guesses.heads
        if few_keys and self.objection({path: inside}, 2 * guesses.key_heads):
            # Ranks cannot share a key/value head in this block, so there must not be more ranks than key/value heads.
            alone = replace(inside, key_value={})
            inside = inside if self.objection({path: alone}) else alone
        return inside


def _infer(model: Any, subject: Subject) -> Inference:
    layers = subject.layers.removeprefix(base_prefix(model))
    try:
        traced = trace(subject)
    except Exception as error:  # of any type: stock code may fail under hooks
        raise Unproved(f"a tiny copy of the model cannot be traced: {brief(error)}") from error
    candidates, passed = find_candidates(subject, traced)
    _check_layer_kinds(model, subject)
    search = _Search(subject, traced, layers, passed)
    outcomes = [
        (candidate, block)
        for candidate in candidates
        if (block := search.find(candidate)) is not None
    ]
    blocks, attention = _together(search, outcomes)
    blocks = _that_hold_with_odd_widths(search, model, blocks)
    if not blocks:
        raise Unproved(
            "; ".join(search.refused)
            or "no projection of the model's layers writes what the next layer reads"
        )
    fields = find_dropouts(model, blocks)
    blocks = {path: replace(block, dropout=fields[path]) for path, block in blocks.items()}
    proof = search.prove(blocks)
    source = f"{INFERRED}, and proved on a tiny clone (worst relative difference {proof.worst:.0e})"
    blueprint = Blueprint(layers, blocks, source=source)
    return Inference(
        blueprint, proof, tuple(path for path in blocks if path in attention), tuple(search.refused)
    )


def _together(
    search: _Search, found: Iterable[tuple[CandidateBlock, Block]]
) -> tuple[dict[str, Block], set[str]]:
    """Prove, on one clone, all blocks that were proved one by one, after merging blocks at the same path; leave out
    blocks that do not hold together with the others. Return the blocks, and the paths of attention blocks.
    """
    blocks: dict[str, Block] = {}
    attention = set()
    for candidate, block in found:
        path = candidate.path
        union = _union(blocks[path], block) if path in blocks else block
        if objection := search.objection({**blocks, path: union}):
            search.refused.append(f"{candidate}: beside the others, {objection}")
            continue
        blocks[path] = union
        if candidate.attends:
            attention.add(path)
    return blocks, attention


def _union(first: Block, second: Block) -> Block:
    """Merge the roles of the modules in two blocks at the same path, of different layers or of one layer."""
    listed = (
        "column",
        "row",
        "enter",
        "leave",
        "shared",
        "across",
        "sample_heads",
        "local_attributes",
        "local_config",
    )
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


def _that_hold_with_odd_widths(
    search: _Search, model: Any, blocks: dict[str, Block]
) -> dict[str, Block]:
    """Return the blocks whose roles of modules also hold on a clone with other sizes (odd MLP widths), and thus not by
    coincidence.
    """
    fields = search.subject.model.config.to_dict()
    odd = {
        name: value + 1
        for name, value in fields.items()
        if type(value) is int and value in (48, 24)
    }
    if not odd:
        return blocks
    try:
        other = _Search(make_subject(model, **odd), search.traced, search.layers)
    except Unproved:  # some sizes must not be odd
        return blocks
    if not other.objection(blocks):
        return blocks
    objections = {path: other.objection({path: block}) for path, block in blocks.items()}
    search.refused += [
        f"{path or 'the layer'}: with odd widths, {why}" for path, why in objections.items() if why
    ]
    return {path: block for path, block in blocks.items() if not objections[path]}


def _check_layer_kinds(model: Any, subject: Subject) -> None:
    """Raise for a model that has kinds of layers that its clone lacks, because nothing is proved about such layers."""
    shown = {_kind_of_layer(subject.model.get_submodule(name)) for name in subject.layer_names}
    for name, layer in model.get_submodule(subject.layers).named_children():
        missing = _kind_of_layer(layer)
        if missing not in shown:
            nearest = min(shown, key=lambda kind: len(kind ^ missing))
            different = ", ".join(
                sorted(f"{path or 'the layer'}: {kind}" for path, kind in missing - nearest)[:3]
            )
            raise Unproved(
                f"layer {name} is of a kind that the tiny copy of the model does not contain ({different})"
            )


def _kind_of_layer(layer: Any) -> frozenset[tuple[str, str]]:
    """Return the classes of the layer's modules by path. Numbers in paths are masked, since lists may
    differ in length.
    """
    return frozenset(
        (wild_name(name), type(module).__name__) for name, module in layer.named_modules()
    )


def find_dropouts(model: Any, blocks: dict[str, Block]) -> dict[str, tuple[str, ...]]:
    """Map each block to the config fields of its dropout: if such a field is increased, the block draws random numbers
    between its column-parallel and row-parallel projections.
    """
    fields_of: dict[str, list[str]] = {path: [] for path in blocks}
    for name in _fields(model.config.to_dict()):
        raised = _raised(model, name)
        for path in _that_draw(raised, blocks) if raised is not None else ():
            fields_of[path].append(name)
    return {path: tuple(fields) for path, fields in fields_of.items()}


def _that_draw(subject: Subject, blocks: dict[str, Block]) -> set[str]:
    """Return the paths of the blocks that draw random numbers (dropout) between their column-parallel and row-parallel
    projections.
    """
    states: dict[str, Tensor] = {}
    drawing: set[str] = set()

    def column(block: str, *_: Any) -> None:
        states[block] = torch.random.get_rng_state()

    def row(
        block: str,
        path: str,
        _: Any,
        args: tuple[Tensor, ...],
    ) -> None:
        now = torch.random.get_rng_state()
        drawn = not torch.equal(states.get(block, now), now)
        # dropout with probability 1 zeroes all entries without drawing random numbers
        if drawn or not args[0].any():
            drawing.add(path)

    modules = dict(subject.model.named_modules())
    handles: list[Any] = []
    for layer, path in product(subject.layer_names, blocks):
        block = join_path(layer, path)
        for child in blocks[path].column:
            if (name := f"{block}.{child}") in modules:
                handles.append(modules[name].register_forward_hook(partial(column, block)))
        for child in blocks[path].row:
            if (name := f"{block}.{child}") in modules:
                handles.append(modules[name].register_forward_pre_hook(partial(row, block, path)))
    run_hooked(subject.model, subject.inputs, handles)
    return drawing


def _fields(fields: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield names of the dropout probabilities in a config and its nested configs (``attn_config.attn_pdrop``)."""
    for name, value in fields.items():
        if not isinstance(name, str):  # keys of label maps are numbers
            continue
        if isinstance(value, dict) and not prefix:
            yield from _fields(value, f"{name}.")
        elif (
            any(word in name for word in DROPOUT_WORDS)
            and isinstance(value, (float, int))
            and value is not True
        ):
            yield prefix + name


def _raised(model: Any, field: str) -> Subject | None:
    """Return a clone in training mode with one dropout probability increased; ``None`` if the clone cannot be built."""
    outer, _, name = field.rpartition(".")
    for probability in _RAISED:
        change: dict[str, Any] = {field: probability}
        if outer:
            change = {
                outer: {
                    **tiny_clone(model.config).to_dict()[outer],
                    name: probability,
                }
            }
        try:
            subject = make_subject(model, **change)
        except Unproved:
            continue
        subject.model.train()
        return subject
    return None
