"""Plan context parallelism, if a layout has several context ranks."""

from ...plan.drafting.draft import Draft, Planned


def plan_context(draft: Draft) -> None:
    """Plan how sequences are sharded; record problems if this is not possible."""
    if draft.layout.cuts_sequences:
        from .sequence_plan import plan_sequences

        plan_sequences(draft)


def cuts_sequences(model: Planned) -> bool:
    """Return whether sequences are sharded over context ranks."""
    return model.plan.layout.cuts_sequences
