"""Define the interface of a feature's planning half."""

from typing import Protocol

from .draft import Draft


class PlanPart(Protocol):
    """One feature of a layout (experts, tensor blocks, stages ...) as it is planned: a function of the draft.

    It reads the model, the layout and what earlier parts have decided, and adds to the draft what it decides itself:
    cuts, parameters with partial gradients, modules, stages; and every problem that it finds, with the values that
    would do, since all problems are reported at once, before any weight is read. Where the layout does not ask for the
    feature it adds nothing.

    :data:`hfscale.api.build_plan.PLAN_PARTS` lists them. What a part prints of the finished plan is a function of
    :mod:`hfscale.plan.lines`, below the planner, so that a plan can be printed without it; what a part costs in memory
    is read off the plan in :mod:`hfscale.cost.model`.
    """

    def __call__(self, draft: Draft) -> None:
        """Add what the feature decides, and its problems, to ``draft``."""
