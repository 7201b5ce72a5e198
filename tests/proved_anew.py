"""Prove facts again that the table has, for the script that writes it and for the tests of proofs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hfscale.models import facts


class DoubtedFacts(facts.Facts):
    """Prove each config anew, also where another one of the digest has been asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.contradictions: list[
            str
        ] = []  # models of one digest for which different answers were proved, in words

    def ask(self, *args: Any, **kwargs: Any) -> Any:
        before = self.proved
        self.proved = {}
        try:
            return super().ask(*args, **kwargs)
        finally:
            now = self.proved
            self.proved = before
            for kind, digests in now.items():
                for key, answers in digests.items():
                    known = before.setdefault(kind, {}).setdefault(key, {})
                    for name, answer in answers.items():
                        if (first := known.setdefault(name, answer)) != answer:
                            self.contradictions.append(
                                f"{kind} {key}: {name}: proved both {first} and {answer}"
                            )


@contextmanager
def proved_anew(written: facts.Answers | None = None, doubted: bool = False) -> Iterator[Any]:
    """Prove every question inside the with block except facts that are ``written``; each config anew if ``doubted``."""
    before = facts._facts
    facts._facts = DoubtedFacts() if doubted else facts.Facts()
    facts._facts.written = written or {}
    try:
        yield facts._facts
    finally:
        facts._facts = before
