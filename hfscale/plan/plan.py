"""Define the plan: frozen data about every parameter and module of a model under a layout.

It is computed once (:func:`hfscale.api.build_plan.build_plan`), on the meta device, and read by everything else: the
loader, the edges of blocks, gradient reductions, norm clipping, the checkpoint writer and the printed table.
"""

from dataclasses import dataclass

from .contents import PlanContents
from .table import render


@dataclass(frozen=True)
class Plan(PlanContents):
    """Hold a model under a layout: see :class:`.contents.PlanContents`. ``print(plan)`` shows a table."""

    def __str__(self) -> str:
        return render(self)
