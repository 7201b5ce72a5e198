"""The exceptions hfscale raises. Every message says what was asked, what was found and what to do."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class HFScaleError(Exception):
    """Root of every error raised by hfscale.

    Attributes:
        everywhere: whether every rank raises it, and need not be told of it.
    """

    everywhere = False


class ConfigError(HFScaleError, ValueError):
    """A field of a :class:`~hfscale.ParallelConfig`, or an argument, is unknown or impossible in itself."""


class PlanError(HFScaleError, ValueError):
    """A layout does not fit a model. The message lists every problem found, each with the valid values."""


class MeshError(HFScaleError, RuntimeError):
    """The processes that were started do not fit the layout."""


class CheckpointError(HFScaleError, RuntimeError):
    """A checkpoint could not be read or written whole."""


class RankFailedError(CheckpointError):
    """Some ranks failed in what all ranks do together; it is raised on every rank.

    Attributes:
        failures: rank -> what went wrong there.
    """

    everywhere = True

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


def in_words(error: BaseException | None) -> str:
    """Return what went wrong, never empty where something did: errors of Python's own need their type's name."""
    if error is None:
        return ""
    text = str(error)
    plain = text and isinstance(error, OSError | HFScaleError)
    return text if plain else f"{type(error).__name__}: {text}".rstrip(": ")


def refuse_misspelt(kind: str, given: Iterable[str], fields: list[str]) -> None:
    """Refuse names that are none of the ``fields`` of a class called ``kind``.

    Raises:
        ConfigError: it names the closest field, and all of them.
    """
    for name in given:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{kind} has no field {name!r}{hint} Its fields are {', '.join(fields)}")


def check_count(name: str, given: object) -> None:
    """Refuse what counts nothing: an argument called ``name`` that is no whole number of at least 1.

    Raises:
        ConfigError: with the value.
    """
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"{name}={given!r} is impossible: use a whole number of at least 1")


def check_names(name: str, given: Any, like: str) -> None:
    """Refuse what is no list of names, for an argument called ``name``.

    Args:
        like: what is, in a message.

    Raises:
        ConfigError: with the value.
    """
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not listed or not all(isinstance(each, str) and each for each in given):
        raise ConfigError(f"{name}={given!r} is impossible: pass a list of names, as {like}")


def check_switch(name: str, given: object) -> None:
    """Refuse what is neither ``True`` nor ``False`` for an argument called ``name``.

    Raises:
        ConfigError: with the value.
    """
    if not isinstance(given, bool):
        raise ConfigError(f"{name}={given!r} is not a switch: use True or False")
