"""Plan sequence parallelism: where the stream is cut, and which parameters see their rank's tokens only."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..families import SEQUENCE_UNFIT
from ..families.blueprint import INFERRED
from ..plan.modules import BlockPlan, ExpertsPlan, SequencePlan
from ..plan.parameter import wild_name
from .draft import Draft
from .probe import PROBED, direct_children, probe_entry

_TOKENWISE = (nn.Linear, Conv1D, nn.Dropout, nn.Identity, nn.Embedding)


def share_evenly(total: int, size: int) -> list[int]:
    """``total`` entries over ``size`` ranks: lengths that differ by at most one, the longer ones first."""
    return [total // size + (rank < total % size) for rank in range(size)]


def plan_sequence_regions(
    draft: Draft,
    layers: list[str],
    blocks: list[BlockPlan],
    experts: Sequence[ExpertsPlan],
    embedding: str | None,
    source: str,
) -> tuple[SequencePlan, ...]:
    """One stream per layer list; the rules of its parameters go into ``draft``."""
    unfit = SEQUENCE_UNFIT.get(draft.config.model_type)
    if source.startswith(INFERRED):
        unfit = "its blueprint is inferred, which proves nothing of what lies between the blocks"
    if unfit:
        draft.problem(
            f"sequence_parallel=True does not fit {draft.config.model_type!r}: {unfit}: use sequence_parallel=False"
        )
        return ()
    lists: dict[str, list[str]] = {}
    for layer in layers:
        lists.setdefault(layer.rpartition(".")[0], []).append(layer)
    owners = {path.rpartition(".")[0]: members for path, members in lists.items()}
    probe = probe_entry(draft, {members[0]: owner for owner, members in owners.items()}, embedding)
    streams = []
    for owner, members in owners.items():
        if not any(name.startswith(f"{owner}.") for name in (*(b.name for b in blocks), *(e.name for e in experts))):
            continue
        before = probe.before.get(owner)
        rest = [
            name for name in direct_children(draft.modules, owner) if name not in lists and _has_parameters(draft, name)
        ]
        if rest and before is None:
            draft.problem(
                f"sequence_parallel=True needs to know which of {', '.join(map(wild_name, rest))} come before the "
                f"layers, and {type(draft.model).__name__} cannot be traced ({probe.failure}): use "
                "sequence_parallel=False"
            )
            continue
        shape = probe.shapes.get(owner)
        if shape is not None and (len(shape) != 3 or shape[0] != PROBED[0]):
            draft.problem(
                f"sequence_parallel=True does not fit {draft.config.model_type!r}: its layers get a stream of the "
                f"shape {shape} for {PROBED[0]} sample of {PROBED[1]} tokens, and not (samples, tokens, width): use "
                "sequence_parallel=False"
            )
            continue
        after = [name for name in rest if name not in (before or ())]
        edges, mixtures = _edges(blocks), _mixtures(draft, experts)
        streams.append(
            SequencePlan(
                owner=owner,
                exit=after[0] if len(after) == 1 else owner,  # an owner may reshape what its only norm returns
                layers=tuple(members),
                gathered=tuple(name for layer in members for name in _gathered(draft, layer, edges, mixtures)),
                partial=tuple(_partial(draft, [*members, *after])),
                direct=probe.direct == members[0] and _only_looks_up(draft, embedding),
                dropout=_drops_out(draft, members),
            )
        )
    return tuple(streams)


def _only_looks_up(draft: Draft, embedding: str | None) -> bool:
    """Whether the embedding does nothing after the lookup that a sum over ranks would have to come before."""
    return embedding is not None and type(draft.modules[embedding]).forward is nn.Embedding.forward


def _has_parameters(draft: Draft, name: str) -> bool:
    return next(draft.modules[name].parameters(), None) is not None


def _edges(blocks: list[BlockPlan]) -> set[str]:
    """Modules inside edges, or with an edge on them."""
    return {name for block in blocks for name in (*block.enter, *block.leave, *block.row)}


def _mixtures(draft: Draft, experts: Sequence[ExpertsPlan]) -> set[str]:
    """Modules that treat every token by itself because they are a router, experts, and shared experts with edges."""
    return {each.name.rpartition(".")[0] for each in experts if draft.layout.slices_tokens}


def _gathered(draft: Draft, path: str, edges: set[str], mixtures: set[str]) -> Iterator[str]:
    """Modules under ``path`` that are outside of all edges and may compute across tokens."""
    for name in direct_children(draft.modules, path):
        module = draft.modules[name]
        if name in edges or name in mixtures or isinstance(module, _TOKENWISE) or "Norm" in type(module).__name__:
            continue
        if any(edge.startswith(f"{name}.") for edge in edges):
            yield from _gathered(draft, name, edges, mixtures)
        elif _has_parameters(draft, name):
            yield name


def _partial(draft: Draft, roots: list[str]) -> Iterator[str]:
    """Modules under ``roots`` that own parameters without a rule yet; the rule is that their gradients are partial."""
    for root in roots:
        for name, module in draft.modules[root].named_modules(prefix=root):
            own = [f"{name}.{child}" for child, _ in module.named_parameters(recurse=False)]
            free = [parameter for parameter in own if parameter not in draft.rules]
            draft.rules.update(dict.fromkeys(free, (None, ("tp",))))
            if free and len(free) == len(own):
                yield name
            elif free:
                draft.problem(
                    f"sequence_parallel=True: {wild_name(name)} holds parameters that are cut and others that are not: "
                    "use sequence_parallel=False"
                )


def _drops_out(draft: Draft, layers: list[str]) -> bool:
    modules = [module for layer in layers for module in draft.modules[layer].modules()]
    fields: dict[str, Any] = draft.config.to_dict()
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules) or any(
        "drop" in name and isinstance(value, float) and value > 0 for name, value in fields.items()
    )
