"""What hfscale relies on of other libraries' private names: a table, and for each name a test that exercises it.

A test looks its names up by itself, and imports nothing of hfscale: where a name is gone, importing hfscale may fail as
a whole, and this must still say which name it was and which file of ``hfscale/_compat`` has to be mended.

A name is written as it is reached, ``torch.nn.Module.train``; behind a colon is what instances have alone,
``torch.nn.Module:_parameters``, which the test itself reads; ``one or other`` are names of different versions.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import pytest

_DISTRIBUTIONS = {"liger_kernel": "liger-kernel"}


@dataclass(frozen=True)
class Promise:
    """One name, the file that relies on it, and the test that says what for."""

    name: str
    file: str
    function: Callable[..., None]

    @property
    def test(self) -> str:
        return self.function.__name__


TABLE: list[Promise] = []


def relying(*files: str) -> Callable[..., Callable[[Callable[..., None]], Callable[..., None]]]:
    """Return the decorator of tests of names that ``files`` rely on: below ``hfscale/_compat``, or with their path."""

    def relies_on(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def decorate(test: Callable[..., None]) -> Callable[..., None]:
            assert test.__doc__, f"{test.__name__} must say what is relied on"
            promise = " ".join(test.__doc__.split())
            TABLE.extend(Promise(name, file, test) for name in names for file in files)
            mend = " and ".join(map(path_of, files))

            @wraps(test)
            def checked(*args: Any, **kwargs: Any) -> None:
                for name in names:
                    if not _is_there(name):
                        raise AssertionError(
                            f"{name} is gone from {version_of(name)}: mend {mend}, which relied on it: {promise}"
                        )
                try:
                    test(*args, **kwargs)
                except Exception as error:
                    if other := _gone_of_another(error, names):
                        raise AssertionError(
                            f"{error}: mend {path_of(other.file)}, as {other.test} says"
                        ) from error
                    raise AssertionError(
                        f"{', '.join(names)} of {version_of(names[0])}: no longer is it so that: {promise} Mend {mend} "
                        f"({type(error).__name__}: {error})"
                    ) from error

            return checked

        return decorate

    return relies_on


def path_of(file: str) -> str:
    """Return the file that is to be mended, from the repository's root."""
    return file if file.startswith("hfscale/") else f"hfscale/_compat/{file}"


def _gone_of_another(error: BaseException, names: Sequence[str]) -> Promise | None:
    """Return whose name it is that is gone, if it is one of the table, and none of ``names``."""
    gone = getattr(error, "name", None)
    if not isinstance(error, AttributeError) or any(parts_of(name)[-1] == gone for name in names):
        return None
    return next((each for each in TABLE if gone in parts_of(each.name)), None)


def parts_of(name: str) -> list[str]:
    """Return the identifiers in a name of the table, in order."""
    return re.split(r"[.:]| or ", name)


def version_of(name: str) -> str:
    """Return the library that a name is of, with its version."""
    library = name.partition(".")[0]
    try:
        return f"{library} {metadata.version(_DISTRIBUTIONS.get(library, library))}"
    except metadata.PackageNotFoundError:  # Python's own
        return library


def found(name: str) -> Any:
    """Return what a dotted name stands for; :class:`LookupError` if a part of it is gone."""
    parts = name.partition(":")[0].split(".")
    if find_spec(parts[0]) is None:
        pytest.skip(f"{parts[0]} is not installed")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            reached = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module}.".startswith(f"{error.name}."):
                continue  # an attribute, or gone
            raise
        for part in parts[length:]:
            try:
                reached = getattr(reached, part)
            except AttributeError as error:
                raise LookupError(name) from error
        return reached
    raise LookupError(name)


def _is_there(name: str) -> bool:
    for each in name.split(" or "):
        try:
            found(each)
        except LookupError:
            continue
        return True
    return False
