"""Steps whose loss or gradients are no numbers: left out by all ranks together, counted, and not forever."""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import HFScaleError, check_count


class BadStepError(HFScaleError, RuntimeError):
    """Too many steps in a row were no numbers."""


@dataclass
class BadSteps:
    """Decides which steps to leave out::

        bad = hfscale.BadSteps(limit=10)
        loss = hfscale.train_step(model, batch)
        norm = hfscale.clip_grad_norm_(model, 1.0)
        if bad.may_step(loss, norm):
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    Loss and norm are those of the whole step and the whole model, the same on every rank, so that all ranks decide
    alike without another word. It has a state, for :func:`hfscale.save_state`.

    Attributes:
        limit: how many in a row are too many.
        skipped: how many were left out.
        in_a_row: how many since the last good one.
    """

    limit: int = 10
    skipped: int = field(default=0, init=False)
    in_a_row: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_count("limit", self.limit)

    def may_step(self, loss: Tensor | float, norm: Tensor | float) -> bool:
        """Whether loss and norm of gradients are numbers; what is ``inf`` is none.

        Raises:
            BadStepError: on every rank, where ``limit`` steps in a row were not.
        """
        if math.isfinite(float(loss)) and math.isfinite(float(norm)):
            self.in_a_row = 0
            return True
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        if self.in_a_row >= self.limit:
            raise BadStepError(
                f"{self.in_a_row} steps in a row had a loss or gradients that are no numbers (the last: loss "
                f"{float(loss)}, norm {float(norm)}): go on from an earlier state with a lower learning rate, or look "
                "at the data of these steps"
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
