"""Which steps of a run a profile is of; read before anything is imported for it."""

import re

from .schema import RecipeError

STEPS_BEFORE_PROFILE = 2
"""Steps that are never profiled: the first makes buffers and kernels, the second one warms the profiler up."""


def steps_to_profile(asked: str, steps: int) -> int:
    """``"3 steps"`` -> 3.

    Args:
        steps: of the run.

    Raises:
        RecipeError: it says no number of steps, or more than the run has behind its first two.
    """
    found = re.fullmatch(r"\s*(\d+)(?:\s+steps?)?\s*", asked)
    if found is None or int(found[1]) < 1:
        raise RecipeError(f"profile={asked!r} says no number of steps: write profile: 3 steps")
    most = max(steps - STEPS_BEFORE_PROFILE, 0)
    if int(found[1]) > most:
        raise RecipeError(
            f"profile={asked!r} begins behind the first {STEPS_BEFORE_PROFILE} steps, and training.steps={steps}: "
            f"use at most {most}, or more training.steps"
        )
    return int(found[1])
