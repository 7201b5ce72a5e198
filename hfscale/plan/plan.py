"""Define ``Plan``, which prints as a table."""

from dataclasses import dataclass

from .contents import PlanContents


@dataclass(frozen=True)
class Plan(PlanContents):
    """Hold the plan of a model under a layout: see :class:`.contents.PlanContents`. ``print(plan)`` shows a table."""

    def __str__(self) -> str:
        from .table import render

        return render(self)
