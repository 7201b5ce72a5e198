"""Prove facts again that the table has, for the script that writes it and for the tests of proofs."""

from collections.abc import Iterator
from contextlib import contextmanager

from hfscale.models import facts


@contextmanager
def proved_anew(written: facts.Answers | None = None, doubted: bool = False) -> Iterator[facts.Facts]:
    """Prove every question inside the with block except facts that are ``written``; each config anew if ``doubted``."""
    before, facts._facts = facts._facts, facts.Facts(written or {}, doubted)
    try:
        yield facts._facts
    finally:
        facts._facts = before
