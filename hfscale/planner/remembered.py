"""Cache answers that take seconds to find, for plans made again: by every stage, for adapters, in a loop of plans."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

AnswerT = TypeVar("AnswerT")


class Remembered(Generic[AnswerT]):
    """A cache of the latest answers, by key.

    Args:
        most: how many answers are kept.
    """

    def __init__(self, most: int = 256) -> None:
        self._answers: dict[Hashable, AnswerT] = {}
        self._most = most

    def answer(self, key: Hashable, find: Callable[[], AnswerT]) -> AnswerT:
        """Return the answer for ``key``, from ``find`` if it is not cached; exceptions are not cached."""
        if key in self._answers:
            return self._answers[key]
        found = self._answers[key] = find()
        if len(self._answers) > self._most:
            del self._answers[next(iter(self._answers))]
        return found

    def forget(self) -> None:
        """Clear the cache."""
        self._answers.clear()


def said_by(config: Any) -> str:
    """Return a config as a string to use as a cache key: equal strings describe the same model."""
    said: str = config.to_json_string(use_diff=False)
    return said
