"""Stop work at every one of its file events, as if the process had been killed there."""

import hashlib
import io
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hfscale.distributed.files import replace

_CALLS = (
    "open",
    "fsync",
    "mkdir",
    "rmdir",
    "unlink",
    "rename",
    "replace",
    "link",
    "chmod",
    "utime",
)
_EVENTS = [*((os, name) for name in _CALLS), (io, "open"), (replace, "_trade_names")]
_FSYNC = os.fsync


class Killed(BaseException):
    """Raised by the event at which the process dies, and by all that come after it: nothing is cleaned up."""


def killed_at_each_event(work: Callable[[], Any], prepare: Callable[[], Any]) -> Iterator[int]:
    """Run ``work`` again and again, killed before its first, second, ... file event, until it ends.

    Args:
        prepare: called before each time.

    Yields:
        the number of the event, behind each kill; 0 at last, when ``work`` ended by itself.
    """
    for number in itertools.count(1):
        prepare()
        events = itertools.count(1)

        def before(
            function: Callable[..., Any], events: Any = events, number: int = number
        ) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(events) >= number:
                    raise Killed
                return None if function is _FSYNC else function(*arguments, **options)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for module, name in _EVENTS:
                patch.setattr(module, name, before(getattr(module, name)))
            try:
                work()
            except Killed:
                ended = False
            else:
                ended = True
        yield 0 if ended else number
        if ended:
            return


def contents(directory: Path) -> dict[str, str]:
    """A checksum of every file below a directory, but for those in hidden directories."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    names = {path.relative_to(directory): path for path in files}
    return {
        str(name): hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in names.items()
        if not name.parts[0].startswith(".")
    }
