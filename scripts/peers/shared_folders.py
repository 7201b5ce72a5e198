"""Temporary folders that ranks share: what a test makes for itself, each rank of it finds under the same path."""

import inspect
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import pytest


def share(config: pytest.Config, tests: Path, folder: Path) -> None:
    """Give the ranks' tests in ``tests`` their temporary folders in ``folder``, in the order in which they ask.

    Libraries keep folders of their own, since they may ask on one rank only. Nothing is removed: ranks end apart.
    """
    numbers = count()
    stock = tempfile.mkdtemp

    def mktemp(basename: str, numbered: bool = True) -> Path:
        made = folder / basename
        made.mkdir(parents=True, exist_ok=True)
        return made

    def mkdtemp(*args: Any, **kwargs: Any) -> str:
        if not _asked_by(tests):
            return stock(*args, **kwargs)
        return str(mktemp(f"folder-{next(numbers)}"))

    config._tmp_path_factory.mktemp = mktemp  # type: ignore[attr-defined]
    tempfile.mkdtemp = mkdtemp  # type: ignore[assignment]
    tempfile.TemporaryDirectory.cleanup = lambda self: self._finalizer.detach()  # type: ignore[attr-defined]


def _asked_by(tests: Path) -> bool:
    """Return whether the caller, outside of ``tempfile`` and of this file, is one of the tests, or what helps them."""
    frames = (frame.filename for frame in inspect.stack(0))
    first = Path(next(name for name in frames if name not in (tempfile.__file__, __file__)))
    return first.is_relative_to(tests) or first.name == "testing_utils.py"
