"""Check this machine, and a recipe, for problems before a run starts."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        about: the subject of the check, in a word or two.
        verdict: ``note`` means that nothing is wrong, but worth knowing.
        text: the result; for a problem, also the remedy.
    """

    about: str
    verdict: Verdict
    text: str
