"""Plan sequence parallelism: where hidden states are sharded, and which parameters have partial gradients."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ....models import SEQUENCE_UNFIT
from ....models.blueprint import INFERRED
from ....models.facts import ask
from ....models.module_kinds import is_tokenwise
from ....models.names import wild_name
from ....plan.drafting.draft import Draft
from ....plan.drafting.layers import direct_children
from ....plan.modules import SequencePlan


def plan_sequence(draft: Draft) -> None:
    """Plan sequence parallelism: for each list of layers, where hidden states are sharded along the sequence and
    gathered again.

    Record in ``draft`` which parameters then have partial gradients.
    """
    if draft.tp == 1 or not draft.layout.sequence_parallel or draft.blueprint is None:
        return
    unfit = SEQUENCE_UNFIT.get(draft.config.model_type)
    if draft.blueprint.source.startswith(INFERRED):
        unfit = "its blueprint is inferred, which proves nothing of what lies between the blocks"
    if unfit:
        _unfit(draft, unfit)
        return
    lists: dict[str, list[str]] = {}
    for layer in draft.stack:
        lists.setdefault(layer.rpartition(".")[0], []).append(layer)
    owners = {path.rpartition(".")[0]: members for path, members in lists.items()}
    # XLM has its attention modules in one list and its MLPs in another
    if len(owners) < len(lists):
        _unfit(
            draft,
            f"one module runs several lists of layers ({', '.join(lists)}), and computes between them",
        )
        return
    firsts = {members[0]: owner for owner, members in owners.items()}
    embedding = draft.embedding
    entry = ask(
        "entry",
        draft.model,
        *firsts,
        str(embedding),
        firsts=firsts,
        embedding=embedding,
    )
    inside = [
        *(block.name for block in draft.blocks),
        *(experts.name for experts in draft.experts),
    ]
    regions = (
        _region(draft, owner, members, entry)
        for owner, members in owners.items()
        if any(name.startswith(f"{owner}.") for name in inside)
    )
    added = (_added_region(draft, name) for name in draft.added_layers)
    draft.sequence_regions = (*(region for region in regions if region is not None), *added)


def _unfit(draft: Draft, why: str) -> None:
    family = draft.config.model_type
    draft.problem(
        f"sequence_parallel=True does not fit {family!r}: {why}: use sequence_parallel=False"
    )


def _added_region(draft: Draft, layer: str) -> SequencePlan:
    """Plan the sequence parallelism of a layer that a feature has added to the model. Its input and output have all
    tokens, and hidden states are sharded only inside it.
    """
    gathered = tuple(_gathered(draft, layer))
    partial = tuple(_partial(draft, [layer]))
    return SequencePlan(
        layer,
        layer,
        (layer,),
        gathered,
        partial,
        direct=False,
        dropout=_drops_out(draft, [layer]),
    )


def _region(
    draft: Draft, owner: str, layers: list[str], entry: dict[str, Any]
) -> SequencePlan | None:
    """Plan where the hidden states of ``layers``, which the module ``owner`` calls, are sharded and gathered; if this
    fails, add problems to ``draft`` and return ``None``.
    """
    lists = {layer.rpartition(".")[0] for layer in draft.stack}
    children = direct_children(draft.modules, owner)
    around = [
        name for name in children if name not in lists and [*draft.modules[name].parameters()]
    ]
    before = entry["before"].get(owner)
    odd = entry["odd"].get(owner)
    if around and before is None:
        draft.problem(
            f"sequence_parallel=True needs to know which of {', '.join(map(wild_name, around))} run before the "
            f"layers, but the forward pass of {type(draft.model).__name__} cannot be traced ({entry['failure']}): use "
            "sequence_parallel=False"
        )
        return None
    if odd is not None:
        from ....plan.drafting.boundary_modules import PROBED

        tried = f"{PROBED[0]} sample of {PROBED[1]} tokens"
        _unfit(
            draft,
            f"its layers get a stream of the shape {tuple(odd)} for {tried}, and not (samples, tokens, width)",
        )
        return None
    after = [name for name in around if name not in (before or ())]
    embedding = draft.embedding
    # If the embedding only looks up rows, its sum over ranks may be left to the first layer.
    only_looks_up = (
        embedding is not None and type(draft.modules[embedding]).forward is nn.Embedding.forward
    )
    return SequencePlan(
        owner=owner,
        exit=after[0]
        if len(after) == 1
        else owner,  # a single module (the norm) is the exit, because the owner may reshape the module's output
        layers=tuple(layers),
        gathered=tuple(name for layer in layers for name in _gathered(draft, layer)),
        partial=tuple(_partial(draft, [*layers, *after])),
        direct=entry["direct"] == layers[0] and only_looks_up,
        dropout=_drops_out(draft, layers),
    )


def _gathered(draft: Draft, path: str) -> Iterator[str]:
    """List the modules under ``path`` that are outside all tensor-parallel blocks and may mix tokens."""
    edges = {name for block in draft.blocks for name in (*block.enter, *block.leave, *block.row)}
    # MoE layers compute token by token: a router, experts, and shared experts, which are blocks with their own
    # collectives
    mixtures = {
        expert.name.rpartition(".")[0] for expert in draft.experts if draft.layout.slices_tokens
    }
    for name in direct_children(draft.modules, path):
        # Not looked up by full name: if layers share the module, only one of the module's names is in draft.modules.
        module = draft.modules[path].get_submodule(name.rpartition(".")[2])
        if name in edges or name in mixtures or is_tokenwise(module):
            continue
        if any(edge.startswith(f"{name}.") for edge in edges):
            yield from _gathered(draft, name)
        elif next(module.parameters(), None) is not None:
            yield name


def _partial(draft: Draft, roots: list[str]) -> Iterator[str]:
    """List the modules under ``roots`` whose parameters have no sharding rule yet, since they are in no tensor-parallel
    block. Record that their gradients are partial: each rank computes these modules on its own tokens only.
    """
    for root in roots:
        for name, module in draft.modules[root].named_modules(prefix=root):
            own = [f"{name}.{child}" for child, _ in module.named_parameters(recurse=False)]
            free = [parameter for parameter in own if parameter not in draft.rules]
            draft.rules.update(dict.fromkeys(free, (None, ("tp",))))
            if free and len(free) == len(own):
                yield name
            elif free:
                draft.problem(
                    f"sequence_parallel=True: {wild_name(name)} holds both sharded and replicated parameters, which "
                    "sequence parallelism does not support: use sequence_parallel=False"
                )


def _drops_out(draft: Draft, layers: list[str]) -> bool:
    modules = [module for layer in layers for module in draft.modules[layer].modules()]
    fields: dict[str, Any] = draft.config.to_dict()
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules) or any(
        "drop" in name and isinstance(value, float) and value > 0 for name, value in fields.items()
    )
