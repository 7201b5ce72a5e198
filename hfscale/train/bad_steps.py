"""Skip steps whose loss or gradient norm is not finite: on all ranks together, counted, and up to a limit."""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import HFScaleError, check_count


class BadStepError(HFScaleError, RuntimeError):
    """Raised if too many steps in a row had a loss or gradients that were not finite."""


@dataclass
class BadSteps:
    """Count steps that are not finite, and decide whether the optimizer may step::

        bad = hfscale.BadSteps(limit=10)
        loss = hfscale.train_step(model, batch)
        norm = hfscale.clip_grad_norm_(model, 1.0)
        if bad.may_step(loss, norm):
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    Loss and norm are those of the whole step and the whole model, the same on every rank, so all ranks decide alike
    without communication. It has a state, for :func:`hfscale.save_state`.

    Attributes:
        limit: number of bad steps in a row that raises an error.
        skipped: number of steps skipped so far.
        in_a_row: number of steps skipped since the last good one.
    """

    limit: int = 10
    skipped: int = field(default=0, init=False)
    in_a_row: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_count("limit", self.limit)

    def may_step(self, loss: Tensor | float, norm: Tensor | float) -> bool:
        """Return whether loss and gradient norm are finite, and count the step if they are not; raise
        :class:`BadStepError`, on every rank, if ``limit`` steps in a row were not finite.
        """
        if math.isfinite(float(loss)) and math.isfinite(float(norm)):
            self.in_a_row = 0
            return True
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        if self.in_a_row >= self.limit:
            raise BadStepError(
                f"{self.in_a_row} steps in a row had a loss or gradients that were not finite (the last: loss "
                f"{float(loss)}, norm {float(norm)}): go on from an earlier state with a lower learning rate, or "
                "look at the data of these steps"
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts."""
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
