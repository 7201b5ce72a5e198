"""Check this machine, and a recipe, for problems before a run starts."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """Hold the result of one check: its subject, its verdict (such as ``"problem"``), and a text with the remedy."""

    about: str  # the subject of the check, in a word or two
    verdict: Verdict  # ``note`` means that nothing is wrong, but worth knowing
    text: str  # the result; for a problem, also the remedy
