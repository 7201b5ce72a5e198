"""Plan pipeline parallelism: split a model into stages, if its layout has several."""

from ...plan.drafting.draft import Draft, Planned


def plan_pipeline(draft: Draft) -> None:
    """Split the draft's layers into the stages of its layout; record problems if this is not possible."""
    if draft.layout.pp > 1 or draft.layout.stage_layers is not None:
        from .stage_plan import plan_stages

        plan_stages(draft)


def has_stages(model: Planned) -> bool:
    """Return whether the layers are divided into stages."""
    return model.plan.stages is not None
