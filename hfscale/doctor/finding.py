"""One thing that was looked at."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, and what was found.

    Attributes:
        about: what was looked at, in a word or two.
        verdict: ``note`` is nothing wrong, and worth knowing.
        text: what was found; of a problem, what to do.
    """

    about: str
    verdict: Verdict
    text: str
