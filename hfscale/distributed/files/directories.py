"""Staging directories: their hidden names, the lock of the job that writes one, and their removal.

::

    .NAME.incomplete            where a new NAME is written, locked by the process that does
    .NAME.XXXXXXXX.discarded    a directory that is being removed (8 random digits)

Nothing here follows a symbolic link at one of these names: whoever can write the parent directory could plant one.
"""

import fcntl
import logging
import os
import secrets
import shutil
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)


class DirectoryLock:
    """A lock on a directory that a living process writes; the system releases it when the process ends."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self.held = True
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise CheckpointError(
                f"another job is writing {path} at this moment: give each job a directory of its own"
            ) from error
        except OSError:  # NFS, for one
            self.held = False  # whether the file system supports such locks
            _log.info("%s cannot be locked", path)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def target_of(directory: Any) -> Path:
    """Return the absolute path of a directory to write, symbolic links followed; refuse an empty path and the root."""
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise ConfigError(
            f"the directory to write must be a path, got {directory!r}: name one, 'out' say"
        )
    target = Path(os.path.realpath(directory))
    if target == target.parent:
        raise ConfigError(
            f"the directory to write must not be {str(directory)!r}, the root of the file system"
        )
    return target


def check_inside(name: object, source: str | Path) -> None:
    """Raise CheckpointError if a file name, read from the file ``source``, leads out of its directory."""
    path = Path(name) if isinstance(name, str) else Path()
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise CheckpointError(
            f"{source} names the file {name!r}, which is not in its directory: the names must be of files beside it"
        )


def leads_out(path: Path, beside: Path) -> bool:
    """Return whether links lead from ``path`` to a file that is neither in the directory of the file ``beside`` nor
    where links lead from that: the Hub's cache has all files of a checkpoint behind links, in one directory.
    """
    real = path.resolve()
    return not any(
        real.is_relative_to(home) for home in (beside.parent.resolve(), beside.resolve().parent)
    )


def holds_current_directory(path: Path) -> bool:
    """Return whether the current directory is ``path`` or inside it: if replaced, it would be lost for this process."""
    try:
        return Path.cwd().is_relative_to(path)
    except OSError:  # it is gone already
        return False


def staging_of(target: Path) -> Path:
    """Return the path at which a directory is written before it is complete."""
    return target.with_name(f".{target.name}.incomplete")


def make_staging(target: Path, staging: Path) -> DirectoryLock:
    """Make and lock an empty directory ``staging`` for a new ``target``; remove leftovers of killed processes."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(
            f"{target} is a file, and a directory is to be written there: name another"
        )
    staging.parent.mkdir(parents=True, exist_ok=True)
    for left in staging.parent.glob(f".{escape(target.name)}.????????.discarded"):
        shutil.rmtree(left, ignore_errors=True)
    if staging.is_symlink():
        staging.unlink()  # the link alone
    if staging.is_dir():
        lock = DirectoryLock(staging)
        discard(staging, target)
        lock.release()
    staging.mkdir()
    if target.is_dir():  # new files get the group and rights that they would get in the target
        with suppress(OSError):
            os.chown(staging, -1, target.stat().st_gid)
        shutil.copystat(target, staging)
        staging.chmod(staging.stat().st_mode & 0o7777 | 0o700)
    return DirectoryLock(staging)


def discard(path: Path, target: Path) -> None:
    """Remove ``path`` after renaming it, so that a killed process leaves no partial directory under its name."""
    hidden = discarded_of(path, target)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def discarded_of(path: Path, target: Path) -> Path:
    """Return a hidden name beside ``target`` for a ``path`` that is to be removed."""
    return path.with_name(f".{target.name}.{secrets.token_hex(4)}.discarded")


def sync(path: Path) -> None:
    """Fsync a file, or a directory, so that its renamed, new and removed entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
