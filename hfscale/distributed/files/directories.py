"""Name, lock and remove staging directories, in which a job writes files before they get their final place.

::

    .NAME.incomplete            the directory in which a new NAME is written; the writing process holds its lock
    .NAME.XXXXXXXX.discarded    a directory that is being removed (8 random digits)

The functions of this module follow no symbolic link with one of these names, because any user who can write to the
parent directory could plant such a link.
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
    """Lock a directory while this process writes it; the system releases the lock when the process ends."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self.held = True  # ``False`` if the file system does not support such locks
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise CheckpointError(
                f"another job is writing {path} at this moment: give each job a directory of its own, or wait until "
                "the other job has ended"
            ) from error
        except OSError:  # for example on NFS
            self.held = False
            _log.info("%s cannot be locked: its file system does not support such locks", path)

    def release(self) -> None:
        """Release the lock of the directory; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def target_of(directory: Any) -> Path:
    """Return the absolute path of a directory to write, with symbolic links resolved.

    Raises:
        ConfigError: ``directory`` is no path, is empty, or is the root of the file system.
    """
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise ConfigError(
            f"the directory to write must be a path, got {directory!r}: pass a path, for example 'out'"
        )
    target = Path(os.path.realpath(directory))
    if target == target.parent:
        raise ConfigError(
            f"the directory to write must not be the root of the file system, got {str(directory)!r}: use another path"
        )
    return target


def check_inside(name: object, source: str | Path) -> None:
    """Raise CheckpointError if ``name``, a file name read from the file ``source``, leads out of its directory."""
    path = Path(name) if isinstance(name, str) else Path()
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise CheckpointError(
            f"{source} names the file {name!r}, which is not in its directory: download or save the checkpoint again, "
            "so that all files that it names are in one directory"
        )


def leads_out(path: Path, beside: Path) -> bool:
    """Return whether ``path``, with symbolic links resolved, is outside of both directories that files of a checkpoint
    may be in: that of its file ``beside``, and the one to which ``beside`` leads if it is a link.

    The second directory is allowed because the Hub's cache stores the files of a checkpoint in one directory, and links
    to them from another.
    """
    real = path.resolve()
    return not any(
        real.is_relative_to(home) for home in (beside.parent.resolve(), beside.resolve().parent)
    )


def holds_current_directory(path: Path) -> bool:
    """Return whether the current directory is ``path`` or inside ``path``.

    Replacing such a directory would leave this process in a directory that no longer exists.
    """
    try:
        return Path.cwd().is_relative_to(path)
    except OSError:  # the current directory was removed already
        return False


def staging_of(target: Path) -> Path:
    """Return the path of the hidden directory in which the files of ``target`` are written until they are complete."""
    return target.with_name(f".{target.name}.incomplete")


def make_staging(target: Path, staging: Path) -> DirectoryLock:
    """Make and lock the empty directory ``staging``, in which the new files of ``target`` are written; remove what
    killed processes left of earlier ones.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(
            f"{target} is a file, and a directory is to be written to this path: use another path"
        )
    staging.parent.mkdir(parents=True, exist_ok=True)
    for left in staging.parent.glob(f".{escape(target.name)}.????????.discarded"):
        shutil.rmtree(left, ignore_errors=True)
    if staging.is_symlink():
        staging.unlink()  # removes the link only, not the directory that it leads to
    if staging.is_dir():
        lock = DirectoryLock(staging)
        discard(staging, target)
        lock.release()
    staging.mkdir()
    # new files should get the group and permissions that they would get in the target
    if target.is_dir():
        with suppress(OSError):
            os.chown(staging, -1, target.stat().st_gid)
        shutil.copystat(target, staging)
        staging.chmod(staging.stat().st_mode & 0o7777 | 0o700)
    return DirectoryLock(staging)


def discard(path: Path, target: Path) -> None:
    """Remove the directory ``path``. It is renamed first, so that a process that is killed meanwhile leaves no partial
    directory at ``path``.
    """
    hidden = discarded_of(path, target)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def discarded_of(path: Path, target: Path) -> Path:
    """Return a new hidden path in the same directory as ``path``, to which ``path`` is renamed before it is removed; it
    includes the name of ``target``.
    """
    return path.with_name(f".{target.name}.{secrets.token_hex(4)}.discarded")


def sync(path: Path) -> None:
    """Write a file to disk (fsync) or, for a directory, its list of entries, so that new, renamed and removed files
    survive a crash.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
