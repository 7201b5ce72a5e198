"""The exceptions hfscale raises. Every message says what was asked, what was found and what to do."""

import math
import os
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

from .names import meant


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
            close = meant(name, fields)
            hint = f"; did you mean {close!r}?" if close else "."
            raise ConfigError(f"{kind} has no field {name!r}{hint} Its fields are {', '.join(fields)}")


def check_count(name: str, given: object, least: int = 1) -> None:
    """Refuse what is no whole number of at least ``least`` for an argument called ``name``.

    Raises:
        ConfigError: with the value.
    """
    if isinstance(given, bool) or not isinstance(given, Integral) or given < least:
        raise ConfigError(f"{name}={given!r} is impossible: use a whole number of at least {least}")


def check_number(
    name: str,
    given: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    infinite: bool = False,
) -> None:
    """Refuse what is no number within bounds for an argument called ``name``.

    Args:
        above: what it must be larger than.
        least, most: the smallest and the largest number allowed.
        infinite: whether infinity is allowed.

    Raises:
        ConfigError: with the value and the bounds.
    """
    fits = isinstance(given, Real) and not isinstance(given, bool) and not math.isnan(given)
    fits = fits and (infinite or not math.isinf(given)) and (above is None or given > above)
    if not fits or (least is not None and given < least) or (most is not None and given > most):
        bounds = {"above": above, "of at least": least, "of at most": most}
        asked = " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)
        raise ConfigError(
            f"{name}={given!r} is impossible: use a {'' if infinite else 'finite '}number {asked}".rstrip()
        )


def check_choice(name: str, given: object, known: Sequence[str], more: str = "") -> None:
    """Refuse what is none of the ``known`` values of an argument called ``name``.

    Args:
        more: what else may be given, in a message.

    Raises:
        ConfigError: with the value, and the one that was probably meant.
    """
    if given not in known:
        close = meant(given, known) if isinstance(given, str) else None
        hint = f"did you mean {close!r}? " if close else ""
        raise ConfigError(f"{name}={given!r} is unknown: {hint}use one of {', '.join(known)}{more}")


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


def check_path(name: str, given: object) -> None:
    """Refuse what names no file or directory for an argument called ``name``.

    Raises:
        ConfigError: with the value.
    """
    if not isinstance(given, str | os.PathLike) or not str(given).strip():
        raise ConfigError(f"{name}={given!r} is impossible: use the path of a file or directory")
