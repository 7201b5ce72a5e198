"""Answers that take seconds to find, and are asked for again: by every stage, for adapters, in a loop of plans."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

AnswerT = TypeVar("AnswerT")


class Remembered(Generic[AnswerT]):
    """The latest answers of a process, by what they depend on.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int = 256) -> None:
        self._answers: dict[Hashable, AnswerT] = {}
        self._most = most

    def answer(self, key: Hashable, find: Callable[[], AnswerT]) -> AnswerT:
        """The one for ``key``; ``find`` is called where it is not known, and what that raises is not remembered."""
        if key in self._answers:
            return self._answers[key]
        found = self._answers[key] = find()
        if len(self._answers) > self._most:
            del self._answers[next(iter(self._answers))]
        return found

    def forget(self) -> None:
        """All of them."""
        self._answers.clear()


def said_by(config: Any) -> str:
    """All that a config says: two that say the same describe one model."""
    said: str = config.to_json_string(use_diff=False)
    return said
