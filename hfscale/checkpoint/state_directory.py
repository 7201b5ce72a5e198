"""Directories of saved states: made aside, moved into place, marked whole; and the newest whole one found again.

::

    .NAME.incomplete    where all ranks write; locked by the job that does, so that what a killed one left can be told
    NAME                what it becomes, and is marked
    .NAME.old           what NAME was, until the new one is marked
    .NAME.discarded     what is about to be removed

Killed at any moment, a save leaves a state that is whole: under NAME, or, between the two renames, under .NAME.old.
"""

import fcntl
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError
from ..files.complete import MARK, FileSum, mark_complete, read_mark, size_problems, sync_directory, unmark
from .state_index import INDEX

LATEST, _DISCARDED = "latest", ".discarded"
_log = logging.getLogger(__name__)


class DirectoryLock:
    """Says that a living process writes a directory; the system lifts it when the process ends."""

    def __init__(self, path: Path, wait: bool = False) -> None:
        self._handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            os.close(self._handle)
            raise CheckpointError(
                f"another job is writing {path} at this moment: give each job a directory of its own"
            ) from error
        except OSError:  # a file system without locks
            _log.info("%s cannot be locked", path)

    def release(self) -> None:
        """Lift it, if it is not."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class NewState:
    """One directory in the making, of the rank that makes it.

    Attributes:
        path: where to write.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = staging_of(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _refuse_other(target)
        with suppress(FileExistsError):
            self.path.mkdir()
        self._lock = DirectoryLock(self.path)
        for left in self.path.iterdir():  # by a process that was killed
            left.unlink()

    def commit(self, files: dict[str, FileSum], step: int | None) -> None:
        """Let it take the place of the target, all of its ``files`` being on the disk."""
        target, old = self.target, old_of(self.target)
        sync_directory(self.path)
        parent = DirectoryLock(target.parent, wait=True)
        try:
            if target.exists():
                if problems_of(target):  # what is whole may be in the old one
                    discard(target)
                else:
                    shutil.rmtree(old, ignore_errors=True)
                    target.rename(old)
            self.path.rename(target)
            sync_directory(target.parent)
            mark_complete(target, files, step)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            parent.release()
            self._lock.release()

    def give_up(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def staging_of(target: Path) -> Path:
    """Where a state is written before it is whole."""
    return target.with_name(f".{target.name}.incomplete")


def old_of(target: Path) -> Path:
    """Where a state is until its successor is whole."""
    return target.with_name(f".{target.name}.old")


def discard(path: Path) -> None:
    """Remove a directory: at once under its name, so that a process that is killed meanwhile leaves no half of it."""
    hidden = path.with_name(f".{path.name}{_DISCARDED}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _refuse_other(target: Path) -> None:
    """Refuse to replace what is no state."""
    if target.is_dir() and not _is_state(target):
        others = sorted(path.name for path in target.iterdir())
        if others:
            raise CheckpointError(
                f"{target} holds other things ({', '.join(others[:3])}), which a state would replace: give a directory "
                f"of its own, {target / 'step-100'} say"
            )


def problems_of(directory: Path) -> list[str]:
    """Why a directory is not whole, as far as can be said without reading its files."""
    try:
        return size_problems(directory, read_mark(directory))
    except CheckpointError as error:
        return [str(error)]


def candidates(source: Path) -> list[Path]:
    """The directories that may be meant by ``source``, best first: itself, or the states in it, newest first.

    Raises:
        CheckpointError: there are none.
    """
    if source.name == LATEST and not source.exists():
        source = source.parent
    elif _is_state(source) or _is_state(old_of(source)):
        return [path for path in (source, old_of(source)) if _is_state(path)]
    inside = [path for path in source.iterdir() if _is_state(path)] if source.is_dir() else []
    inside = [path for path in inside if path.suffix != _DISCARDED]
    if not inside:
        raise CheckpointError(
            f"{source} is not a state that hfscale.save_state wrote, and has none in it: give the directory of one, or "
            "the one that they are in"
        )
    return sorted(inside, key=written_at, reverse=True)


def _is_state(path: Path) -> bool:
    return any((path / name).exists() for name in (INDEX, MARK, "layout.json"))


def written_at(directory: Path) -> float:
    """When a state was completed; the beginning of time for one that was not."""
    try:
        return read_mark(directory).written
    except CheckpointError:
        return 0.0


def prune(newest: Path, keep_last: int | None, keep_every: int | None) -> None:
    """Remove states beside ``newest``, which is whole, that need not be kept; what is not whole is not counted.

    Args:
        keep_last: how many of the newest stay; ``None`` for all.
        keep_every: those of steps that this divides stay besides.
    """
    if keep_last is None:
        return
    found = {path: read_mark(path) for path in newest.parent.iterdir() if path != newest and not problems_of(path)}
    order = sorted(found, key=lambda path: found[path].written, reverse=True)
    for path in order[max(keep_last, 1) - 1 :]:
        step = found[path].step
        if keep_every and step is not None and step % keep_every == 0:
            continue
        unmark(path)
        discard(path)
    for path in newest.parent.glob(f".*{_DISCARDED}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in newest.parent.glob(".*.incomplete"):
        try:
            lock = DirectoryLock(path)
        except (CheckpointError, OSError):  # somebody writes it, or has moved it
            continue
        shutil.rmtree(path, ignore_errors=True)
        lock.release()
