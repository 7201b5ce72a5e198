"""Judge what a peer's tests came to: passed, refused on purpose, or at fault."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_OWN_ERROR = "hfscale.errors."


@dataclass(frozen=True)
class Outcome:
    """How one test ended.

    Attributes:
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        reached: what the test called of that which is replaced.
        words: the type and the message of its error.
    """

    id: str
    outcome: str
    reached: tuple[str, ...] = ()
    words: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """Tests that hfscale refuses on purpose: pure data of ``refused.json``.

    Attributes:
        peer: whose tests.
        layouts: where it is refused.
        tests: a pattern that a test's id has.
        words: a pattern that the refusal has, an error of ``hfscale.errors``.
        reason: why it is refused, for readers.
        error: the type that the words begin with; another one where a test itself compares what is one rank's part.
    """

    peer: str
    layouts: tuple[str, ...]
    tests: str
    words: str
    reason: str
    error: str = _OWN_ERROR

    def excuses(self, peer: str, layout: str, outcome: Outcome) -> bool:
        """Return whether a failed test is refused by this; an error of another type never is."""
        here = (
            peer == self.peer
            and layout in self.layouts
            and re.search(self.tests, outcome.id) is not None
        )
        return (
            here
            and outcome.words.startswith(self.error)
            and re.search(self.words, outcome.words) is not None
        )


@dataclass
class Judgement:
    """The tests of one peer in one layout, by what they came to."""

    peer: str
    layout: str
    passed: list[Outcome] = field(default_factory=list)
    refused: list[tuple[Outcome, Refusal]] = field(default_factory=list)
    faults: list[Outcome] = field(default_factory=list)

    @property
    def asked(self) -> int:
        """The number of tests that were run."""
        return len(self.passed) + len(self.refused) + len(self.faults)


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return the outcomes that the plugin wrote, by the test's id; the last of each."""
    if not path.exists():
        return {}
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["id"]: Outcome(**{**line, "reached": tuple(line["reached"])}) for line in lines}


def read_refusals(path: Path) -> list[Refusal]:
    """Return the committed refusals."""
    entries: list[dict[str, Any]] = json.loads(path.read_text())
    return [Refusal(**{**entry, "layouts": tuple(entry["layouts"])}) for entry in entries]


def to_ask(stock: Mapping[str, Outcome]) -> list[str]:
    """Return the tests to run with ours: those that pass with stock classes, and reach one that is replaced."""
    return [each.id for each in stock.values() if each.outcome == "passed" and each.reached]


def judge(
    peer: str, layout: str, outcomes: Iterable[Outcome], refusals: Iterable[Refusal]
) -> Judgement:
    """Sort the outcomes; one that is skipped with ours, and was not with stock classes, is a fault."""
    judgement = Judgement(peer, layout)
    known = list(refusals)
    for outcome in outcomes:
        refusal = next((each for each in known if each.excuses(peer, layout, outcome)), None)
        if outcome.outcome == "passed":
            judgement.passed.append(outcome)
        elif outcome.outcome == "failed" and refusal is not None:
            judgement.refused.append((outcome, refusal))
        else:
            judgement.faults.append(outcome)
    return judgement


def by_words(faults: Iterable[Outcome]) -> dict[str, list[str]]:
    """Return the ids of tests by their error's first line, the most frequent first."""
    found: dict[str, list[str]] = {}
    for outcome in faults:
        first = next(iter(outcome.words.splitlines()), "skipped")
        found.setdefault(re.sub(r"0x[0-9a-f]+", "0x", first)[:300], []).append(outcome.id)
    return dict(sorted(found.items(), key=lambda each: -len(each[1])))
