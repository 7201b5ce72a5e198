"""Config in, plan out: no process group, no weights, no GPU."""

from torch import nn

from ..checkpoint.stored_forms.scheme import description, why_not_read
from ..config.options import NO_OPTIONS, Options
from ..config.parallel import ParallelConfig
from ..errors import PlanError
from ..features.fp8.plan import plan_float8
from ..features.memory.plan import plan_memory
from ..models.blueprint import Blueprint
from ..parallel.context.plan import plan_context
from ..parallel.data.plan import plan_data
from ..parallel.experts.plan import plan_experts
from ..parallel.tensor.plan import plan_sequence
from ..plan.drafting.assign import plan_pipeline
from ..plan.drafting.blocks import plan_tensor
from ..plan.drafting.draft import Draft, Ranks
from ..plan.drafting.draft_own_loss import plan_own_loss
from ..plan.drafting.draft_towers import plan_towers
from ..plan.drafting.layers import find_layers
from ..plan.drafting.plan_part import PlanPart
from ..plan.drafting.resolve import find_blueprint
from ..plan.drafting.vocabulary import plan_vocabulary
from ..plan.plan import Plan
from .plan_parameters import assemble_parameters

PLAN_PARTS: tuple[PlanPart, ...] = (
    plan_experts,
    plan_tensor,
    plan_vocabulary,
    plan_own_loss,
    plan_towers,
    plan_sequence,
    plan_context,
    plan_pipeline,
    plan_data,
    plan_memory,
    plan_float8,
)
"""In order: each finds in the draft what those before it have decided."""


def build_plan(
    model: nn.Module,
    layout: ParallelConfig,
    ranks: Ranks | None = None,
    options: Options = NO_OPTIONS,
) -> Plan:
    """Plan a full, unpatched stock Hugging Face model on any device (the meta device is enough).

    Args:
        ranks: the pipeline rank of each stage, where the schedule is a file, which says so.
        options: of them the plan reads what is recomputed, offloaded or compressed, and products in 8 bits.

    Raises:
        PlanError: the layout does not fit the model; the message lists every problem with the valid values.
    """
    draft = Draft(model, layout, ranks, options)
    _refuse_unavailable(draft)
    draft.blueprint = _blueprint(draft)
    draft.layers = find_layers(draft, draft.blueprint)
    for plan_part in PLAN_PARTS:
        plan_part(draft)
    plan = _assemble(draft)
    if draft.problems:
        raise PlanError(draft.report())
    return plan


def _assemble(draft: Draft) -> Plan:
    return Plan(
        family=draft.config.model_type,
        layout=draft.layout,
        parameters=assemble_parameters(draft),
        layers=tuple(draft.layers),
        blocks=tuple(draft.blocks),
        embedding=draft.embedding,
        head=draft.head,
        loss=draft.loss,
        no_step=draft.no_step,
        lookup=draft.lookup,
        sequence_regions=draft.sequence_regions,
        features=tuple(draft.features),
        experts=draft.experts,
        mixtures=draft.mixtures,
        source=draft.blueprint.source if draft.blueprint and draft.blocks else "",
        stages=draft.stages,
    )


def _refuse_unavailable(draft: Draft) -> None:
    quantized = description(draft.config)
    if quantized is not None:
        draft.problem(
            why_not_read(quantized)
            or f"it is quantized ({quantized['quant_method']}) already, in memory: load the checkpoint with "
            "hfscale.from_pretrained, which reads plain values from it"
        )


def _blueprint(draft: Draft) -> Blueprint | None:
    try:
        return find_blueprint(draft.model, may_infer=draft.tp > 1)
    except PlanError as error:
        if draft.tp > 1:
            draft.problem(str(error))
        return None
