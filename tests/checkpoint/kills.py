"""Kill a save at every one of its file events, each time in a copy of this process."""

import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.chmod", "shutil.rmtree")


def killed_at_each_event(work: Callable[[], Any], root: Path, prepare: Callable[[], Any]) -> Iterator[int]:
    """Run ``work`` again and again, killed before its first, second, ... file event in ``root``, until it ends.

    Args:
        prepare: called before each time.

    Yields:
        the number of the event, behind each kill; 0 at last, when ``work`` ended by itself.
    """
    for number in range(1, 1000):
        prepare()
        child = os.fork()
        if not child:
            try:
                _exit_at(number, root)
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9), code
        yield number if code else 0
        if not code:
            return


def _exit_at(number: int, root: Path) -> None:
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os._exit(9)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS or (event == "open" and os.fspath(root) in str(arguments[0])):
            count()

    fsync = os.fsync
    os.fsync = lambda handle: (count(), fsync(handle))[1]  # type: ignore[assignment]
    sys.addaudithook(hook)


def contents(directory: Path) -> dict[str, str]:
    """A checksum of every file below a directory, hidden ones of its own left out."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    names = {path.relative_to(directory): path for path in files}
    return {
        str(name): hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in names.items()
        if not name.parts[0].startswith(".")
    }
