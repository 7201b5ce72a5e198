"""Derive the sharding of PEFT's parameters from that of the adapted module's parameters.

Low-rank adapters (LoRA, Hu et al. 2021) of a projection ``y = W x``, ``W [out, in]``, over ``t`` tensor ranks::

    column, W sharded on out   A [r, in]    full on every rank, partial gradient    B [out/t, r]  sharded like W
    row,    W sharded on in    A [r, in/t]  sharded like W                          B [out, r]    full, partial gradient

In words: an adapter's dim that runs along a sharded dim of the module is sharded in the same way. All other parameters
are full on every rank, and their gradients are summed over the ranks. One table lists the dims of an adapter's
parameters that run along the module's input and output.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ..._compat.peft import (
    ADAPTER_DIMS,
    COPIES,
    IA3_SCALES,
    IN_FRONT,
    LORA_A,
    PREFIX,
    PROMPT_ENCODER,
    TOKEN_ROWS,
    UNILORA_VECTOR,
)
from ...plan import Plan
from ...plan.cut import Cut
from ...plan.modules import AdapterParameter
from ...plan.parameter import ParameterPlan, data_cut, reductions_of
from ...plan.stages import StagePlan, Tie


def plan_adapters(plan: Plan, adapters: Sequence[AdapterParameter]) -> Plan:
    """Return ``plan`` with the parameters of ``adapters`` after its own; these must be kinds of adapters that hfscale
    can shard.
    """
    stages = plan.stages
    if stages is not None:
        stages = _with_ties(with_encoder(stages, adapters), adapters)
    plan = replace(plan, stages=stages)
    planned = (_planned(plan, adapter) for adapter in adapters)
    return replace(plan, parameters=(*plan.parameters, *planned), adapters=tuple(adapters))


def with_encoder(stages: StagePlan, adapters: Sequence[AdapterParameter]) -> StagePlan:
    """Return the stages with the prompt encoder added to the stages that compute with it: for prefixes, all stages;
    otherwise, the stage of the token embedding.
    """
    if adapters[0].kept_in not in IN_FRONT:
        return stages
    readers = [stages.stage_of(adapters[0].base)]
    if adapters[0].kept_in == PREFIX:
        readers = [stage.index for stage in stages.stages]
    held = tuple(
        replace(stage, modules=(*stage.modules, PROMPT_ENCODER))
        if stage.index in readers
        else stage
        for stage in stages.stages
    )
    ties = stages.ties
    if len(readers) > 1:
        ties = (*ties, *(Tie((adapter.name,), tuple(readers)) for adapter in adapters))
    return replace(stages, stages=held, ties=ties)


def prompt_of(plan: Plan) -> str | None:
    """Return the kind of the plan's prompt: :data:`PROMPT` (virtual tokens), :data:`PREFIX` (virtual keys and values),
    or ``None`` if the plan has no prompt.
    """
    kinds = {adapter.kept_in for adapter in plan.adapters}
    return next((kind for kind in IN_FRONT if kind in kinds), None)


def _with_ties(stages: StagePlan, adapters: Sequence[AdapterParameter]) -> StagePlan:
    """Return the stages with ties between adapters that share a tensor, because their weights are tied in the same
    way.
    """
    names: dict[str, list[str]] = {}
    for adapter in adapters:
        names.setdefault(adapter.first_name, []).append(adapter.name)
    ties = list(stages.ties)
    for same in names.values():
        held = tuple(sorted({stages.stage_of(name) for name in same}))
        if len(held) > 1:
            ties.append(Tie(tuple(same), held))
    return replace(stages, ties=tuple(ties))


def _planned(plan: Plan, adapter: AdapterParameter) -> ParameterPlan:
    base = plan.by_name[adapter.base]
    cuts = list[Cut]()
    partial = base.partial
    if adapter.kept_in in COPIES:
        cuts = list(base.cuts)
    elif adapter.kept_in in IN_FRONT:
        cuts = data_cut(plan.layout)
        partial = ("tp",) if adapter.kept_in == PREFIX and plan.layout.tp > 1 else ()
    else:
        spread = base.cut_over("ep")
        if spread is not None:
            # stacked LoRA factors: A [experts r, in], B [out, r experts]
            parts = (adapter.experts,) * (adapter.shape[1] // adapter.experts)
            of_b = replace(spread, dim=1, parts=parts)
            cuts.append(replace(spread, dim=0) if adapter.kept_in == LORA_A else of_b)
        across = base.cut_over("tp")
        if across is not None:
            dim = _dim_along(adapter, across, len(base.shape))
            if dim is None:
                partial = ("tp",)
            else:
                cuts.append(_cut_along(across, dim, base.shape[across.dim], adapter.shape[dim]))
        # In most modules that share the vector, each rank computes only a part of its gradient.
        if adapter.kept_in == UNILORA_VECTOR and plan.layout.tp > 1:
            partial = ("tp",)
        cuts += data_cut(plan.layout, spread is not None)
    ties = () if plan.stages is None else plan.stages.ties
    tie = next((tie for tie in ties if adapter.name in tie.names), None)
    return ParameterPlan(
        name=adapter.name,
        shape=adapter.shape,
        dtype=adapter.dtype,
        stage=base.stage,
        cuts=tuple(cuts),
        reductions=reductions_of(plan.layout, cuts, partial, tie.stages if tie else ()),
        tied_to=adapter.tied_to,
    )


def _cut_along(across: Cut, dim: int, length: int, own: int) -> Cut:
    """Return how to shard an adapter's ``dim``, given how the module's dim ``across`` is sharded. The adapter's dim has
    ``own`` entries, which correspond, in order, to the ``length`` entries of the module's dim.
    """
    parts = tuple(part * own // length for part in across.parts)
    return replace(across, dim=dim, parts=parts)


def _dim_along(adapter: AdapterParameter, cut: Cut, ndim: int) -> int | None:
    """Return the adapter's dim that corresponds to the dim of ``cut`` in the adapted parameter, if any."""
    # Token rows [n, hidden] have the weight's hidden dim, both in an embedding and in a head.
    if adapter.kept_in == TOKEN_ROWS:
        return (None, 1)[cut.dim]
    along_input = cut.dim - (ndim - 2) == (0 if adapter.transposed else 1)
    of_scales = (1, None) if adapter.shape[0] == 1 else (None, 0)
    dims = of_scales if adapter.kept_in == IA3_SCALES else ADAPTER_DIMS[adapter.kept_in]
    return dims[0 if along_input else 1]


_KINDS = (
    "parameters of the layers",
    "expert parameters",
    "parameters of the embedding",
    "parameters of the head",
    "other matrices",
)


def describe_coverage(plan: Plan) -> str:
    """Return lines for the log: the size of the adapters, and for each kind of matrix (of layers, experts, embeddings,
    head) the percentage that adapters cover. Trained copies count as covered.
    """
    coverage = _coverage(plan)
    trained = sum(prod(a.shape) for a in plan.adapters if a.tied_to is None)
    total = plan.parameter_count
    lines = [
        f"{trained:,} parameters in adapters, {100 * trained / max(1, total - trained):.2f}% of the model's"
    ]
    for kind in filter(coverage.get, _KINDS):
        covered, entries = coverage[kind]
        lines.append(f"{100 * covered / max(1, entries):.1f}% of {kind} have adapters")
    if coverage.get(_KINDS[1], (1, 1))[0] == 0:
        lines.append(
            "no expert has an adapter: name their parameters, like "
            "target_parameters=['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']"
        )
    return "\n".join(lines)


def _coverage(plan: Plan) -> dict[str, tuple[int, int]]:
    """Count, for each kind of matrix (of layers, experts, embeddings, head), the entries that adapters cover and all
    entries.
    """
    front = plan.adapters if prompt_of(plan) is None else ()
    adapted = {adapter.base for adapter in front if not adapter.tokens}
    by_rows = {a.base: prod(a.shape) for a in plan.adapters if a.tokens and a.tied_to is None}
    own = {adapter.name for adapter in plan.adapters}
    experts = tuple(f"{mixture.name}." for mixture in plan.mixtures)
    layers = tuple(f"{layer}." for layer in plan.layers)
    vocabulary = plan.by_name[f"{plan.head}.weight"].shape if plan.head is not None else ()
    of_layers, of_experts, of_embedding, of_head, others = _KINDS
    counts: dict[str, tuple[int, int]] = {}
    for name, shape in (
        (p.name, p.shape) for p in plan.owned() if len(p.shape) > 1 and p.name not in own
    ):
        if name.startswith((*experts, *layers)):
            kind = of_experts if name.startswith(experts) else of_layers
        elif name.rpartition(".")[0] == plan.head:
            kind = of_head
        else:
            kind = of_embedding if shape == vocabulary else others
        covered, total = counts.get(kind, (0, 0))
        own_rows = by_rows.get(name, 0)
        counts[kind] = (covered + prod(shape) * (name in adapted) + own_rows, total + prod(shape))
    return counts
