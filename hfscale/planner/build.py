"""Config in, plan out: no process group, no weights, no GPU."""

from torch import nn

from ..config import ParallelConfig
from ..errors import PlanError
from ..families.blueprint import Blueprint
from ..plan.cut import Cut
from ..plan.modules import SequencePlan
from ..plan.parameter import ParameterPlan, wild_name
from ..plan.plan import Plan
from ..plan.stages import StagePlan
from .assign import Ranks, check_stage_layers, plan_stages, stage_problem
from .blocks import plan_blocks
from .draft import Draft
from .experts import expert_cuts, find_mixtures, plan_experts
from .layers import find_layers
from .resolve import find_blueprint
from .sequence import plan_sequence_regions
from .vocabulary import cut_vocabulary, plan_head

# What this version cannot run. An axis is switched on by taking it out of here.
_LATER = {
    "cp": "context parallelism",
}


def build_plan(model: nn.Module, layout: ParallelConfig, ranks: Ranks | None = None) -> Plan:
    """Plan a stock Hugging Face model, whole and unpatched, on any device (the meta device is enough).

    Args:
        ranks: the pipeline rank of each stage, where the schedule is a file, which says so.

    Raises:
        PlanError: the layout does not fit the model; the message lists every problem with the valid values.
    """
    draft = Draft(model, layout)
    plan = _build(draft, ranks)
    if draft.problems:
        raise PlanError(draft.report())
    return plan


def _build(draft: Draft, ranks: Ranks | None) -> Plan:
    _refuse_unavailable(draft)
    blueprint = _blueprint(draft)
    layers = find_layers(draft, blueprint)
    mixtures = find_mixtures(draft, layers)
    experts = plan_experts(draft, mixtures)
    blocks = plan_blocks(draft, blueprint, layers) if draft.tp > 1 and blueprint else []
    head, loss, no_step = plan_head(draft)
    embedding = cut_vocabulary(draft, head) if draft.tp > 1 else None
    cut_sequence = draft.tp > 1 and draft.layout.sequence_parallel
    streams: tuple[SequencePlan, ...] = ()
    if cut_sequence and blueprint:
        streams = plan_sequence_regions(draft, layers, blocks, experts, embedding, blueprint.source)
    stages = _plan_stages(draft, layers, ranks, no_step)
    return Plan(
        family=draft.config.model_type,
        layout=draft.layout,
        parameters=tuple(_parameters(draft, stages)),
        layers=tuple(layers),
        blocks=tuple(blocks),
        embedding=embedding,
        head=head,
        loss=loss,
        no_step=no_step,
        streams=streams,
        experts=experts,
        mixtures=mixtures,
        source=blueprint.source if blueprint and blocks else "",
        stages=stages,
    )


def _plan_stages(draft: Draft, layers: list[str], ranks: Ranks | None, no_step: str) -> StagePlan | None:
    if draft.layout.size("pp") == 1:
        check_stage_layers(draft, layers)
        return None
    if no_step:  # and nobody can call the model: a rank has but a part of it
        stage_problem(
            draft,
            "train_step does not run its loss (only that of causal language models with a Linear head), and nothing "
            f"else runs stages: {no_step}",
        )
    return plan_stages(draft, layers, ranks)


def _refuse_unavailable(draft: Draft) -> None:
    for axis, what in _LATER.items():
        if draft.layout.size(axis) > 1:
            draft.problem(
                f"{axis}_size={draft.layout.size(axis)}: {what} cannot be run by this version: use {axis}_size=1"
            )
    quantization = getattr(draft.config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        draft.problem(
            f"it is quantized ({getattr(method, 'value', method)}) already, which this version does not load: use a "
            "checkpoint with weights of 16 or 32 bits, which hfscale.from_pretrained(..., quantization_config="
            "BitsAndBytesConfig(load_in_4bit=True)) quantizes as it loads"
        )


def _blueprint(draft: Draft) -> Blueprint | None:
    try:
        return find_blueprint(draft.model, may_infer=draft.tp > 1)
    except PlanError as error:
        if draft.tp > 1:
            draft.problem(str(error))
        return None


def _rules_of_tensors(draft: Draft) -> dict[int, tuple[Cut | None, tuple[str, ...]]]:
    """The rules by tensor: every module that uses one tensor must agree on its rule."""
    by_place = {draft.place(name): rule for name, rule in draft.rules.items()}  # one module may have two names
    chosen: dict[int, tuple[str, tuple[Cut | None, tuple[str, ...]] | None]] = {}
    for name, parameter in draft.named():
        rule = by_place.get(draft.place(name))
        first, agreed = chosen.setdefault(id(parameter), (name, rule))
        if rule != agreed:
            draft.problem(
                f"tp_size={draft.tp}: {wild_name(first)} and {wild_name(name)} are one tensor, and would be cut "
                "differently: correct the blueprint, or use tp_size=1"
            )
    return {key: rule for key, (_, rule) in chosen.items() if rule is not None}


def _parameters(draft: Draft, stages: StagePlan | None) -> list[ParameterPlan]:
    owners: dict[int, str] = {}
    rules, shard = _rules_of_tensors(draft), draft.layout.size("dp_shard")
    result = []
    for name, parameter in draft.named():
        owner = owners.setdefault(id(parameter), name)
        cut, partial = rules.get(id(parameter), (None, ()))
        cuts = [cut] if cut is not None else []
        if draft.layout.data_world > 1 and parameter.ndim == 0:
            draft.problem(
                f"{draft.layout.describe()}: {wild_name(name)} is a scalar, which FSDP2 cannot hold: use "
                "dp_shard_size=1 and dp_replicate_size=1"
            )
        if name in draft.spread:
            cuts = expert_cuts(draft.layout, tuple(parameter.shape), cuts)
        elif shard > 1 and parameter.ndim:
            cuts.append(Cut("dp_shard", 0, shard))
        result.append(
            ParameterPlan(
                name=name,
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                stage=stages.stage_of(name) if stages else 0,
                cuts=tuple(cuts),
                partial=partial,
                tied_to=None if owner == name else owner,
            )
        )
    return result
