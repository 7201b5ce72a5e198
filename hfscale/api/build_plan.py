"""Turn a config into a plan: no process group, no weights, no GPU."""

from dataclasses import fields

from torch import nn

from ..checkpoint.stored_forms.scheme import description, why_not_read
from ..config.options import NO_OPTIONS, Options
from ..config.parallel import ParallelConfig
from ..errors import PlanError
from ..models.names import wild_name
from ..parallel.experts.plan import expert_cuts
from ..plan import Plan
from ..plan.cut import Cut
from ..plan.drafting.draft import Draft, Ranks
from ..plan.drafting.layers import find_layers
from ..plan.parameter import ParameterPlan, data_cut, reductions_of
from .assemble import plan_parts
from .find_blueprint import find_blueprint


def build_plan(
    model: nn.Module,
    layout: ParallelConfig,
    ranks: Ranks | None = None,
    options: Options = NO_OPTIONS,
) -> Plan:
    """Plan a full, unpatched stock Hugging Face model on any device (the meta device is enough). ``ranks`` assigns
    pipeline stages to ranks, if the schedule comes from a file. Raise :class:`PlanError` with all problems of the
    layout and the valid values.
    """
    draft = Draft(model, layout, ranks, options)
    quantized = description(draft.config)
    if quantized is not None:
        draft.problem(
            why_not_read(quantized)
            or f"the model in memory is quantized ({quantized['quant_method']}) already, and hfscale cannot shard it: "
            "load the checkpoint with hfscale.from_pretrained, which reads dequantized weights from it"
        )
    try:
        draft.blueprint = find_blueprint(draft.model, may_infer=draft.tp > 1)
    except PlanError as error:  # without tensor ranks, no blueprint is needed
        if draft.tp > 1:
            draft.problem(str(error))
    layers = find_layers(draft, draft.blueprint)
    draft.layers = [
        *(name for name in layers if not name.startswith(tuple(draft.added_layers))),
        *draft.added_layers,
    ]
    for plan_part in plan_parts():
        plan_part(draft)
    plan = _finished(draft)
    if draft.problems:
        raise PlanError(draft.report())
    return plan


def _finished(draft: Draft) -> Plan:
    """Return the finished plan. Its family, parameters and source are computed in this function; every other field is
    copied from the field of the same name of ``draft``, the plan under construction.
    """
    decided = {
        field.name: getattr(draft, field.name)
        for field in fields(Plan)
        if hasattr(draft, field.name)
    }
    decided = {
        name: tuple(value) if isinstance(value, list) else value for name, value in decided.items()
    }
    source = draft.blueprint.source if draft.blueprint and draft.blocks else ""
    return Plan(
        **{
            **decided,
            "family": draft.config.model_type,
            "parameters": _parameters(draft),
            "source": source,
        }
    )


def _parameters(draft: Draft) -> tuple[ParameterPlan, ...]:
    """Plan every parameter, under each of its names, in the model's order."""
    owners: dict[int, str] = {}
    rules = _rules_of_tensors(draft)
    tied = {
        name: tie.stages
        for tie in (draft.stages.ties if draft.stages else ())
        for name in tie.names
    }
    result = []
    for name, parameter in draft.named():
        owner = owners.setdefault(id(parameter), name)
        cut, partial = rules.get(id(parameter), (None, ()))
        cuts = [cut] if cut is not None else []
        shape = tuple(parameter.shape)
        if name in draft.spread:
            cuts = expert_cuts(draft.layout, shape, cuts)
        elif shape:
            cuts = [*cuts, *data_cut(draft.layout)]
        result.append(
            ParameterPlan(
                name=name,
                shape=shape,
                dtype=parameter.dtype,
                stage=draft.stages.stage_of(name) if draft.stages else 0,
                cuts=tuple(cuts),
                reductions=reductions_of(draft.layout, cuts, partial, tied.get(name, ())),
                tied_to=None if owner == name else owner,
            )
        )
    return tuple(result)


def _rules_of_tensors(draft: Draft) -> dict[int, tuple[Cut | None, tuple[str, ...]]]:
    """Map each tensor's ``id`` to the rule by which it is sharded. Add a problem to the draft of the plan if a tensor
    has several names with different rules.
    """
    # One module may have two names.
    by_place = {draft.place(name): rule for name, rule in draft.rules.items()}
    chosen: dict[int, tuple[str, tuple[Cut | None, tuple[str, ...]] | None]] = {}
    for name, parameter in draft.named():
        rule = by_place.get(draft.place(name))
        first, agreed = chosen.setdefault(id(parameter), (name, rule))
        if rule != agreed:
            draft.problem(
                f"tp_size={draft.tp}: {wild_name(first)} and {wild_name(name)} are one tensor, but the blueprint would "
                "shard them in two ways: correct the model's entry in hfscale.models.FAMILIES, or use tp_size=1"
            )
    return {key: rule for key, (_, rule) in chosen.items() if rule is not None}
