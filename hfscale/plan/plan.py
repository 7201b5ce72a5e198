"""The plan: frozen data that says what becomes of every parameter of a model under a layout.

It is computed once (:func:`hfscale.planner.build.build_plan`), on the meta device, and read by everything else: the
loader, the patcher, gradient sync, norm clipping, the checkpoint writer and the printed table.
"""

from dataclasses import dataclass

from .contents import PlanContents
from .table import render


@dataclass(frozen=True)
class Plan(PlanContents):
    """What becomes of a model under a layout: see :class:`.contents.PlanContents`. ``print(plan)`` is a table."""

    def __str__(self) -> str:
        return render(self)
