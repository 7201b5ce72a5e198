"""Replace some files of a directory all at once, and keep its other files.

A checkpoint consists of several files, and a process may be killed between any two system calls. A save therefore has
three phases:

1. *Write.* New files are written to ``.NAME.incomplete``, in the parent directory of NAME. If the process is killed in
   this phase, NAME is unchanged; the next save removes the incomplete directory. A first save ends with one rename to
   NAME.
2. *Exchange.* The files of NAME that stay are hard-linked into the new directory, together with their sub-directories.
   Everything is synced to disk, and the two directories exchange names in one system call (``renameat2`` of Linux).
   If the process is killed in this phase, NAME is either the complete old directory or the complete new one.
3. *Remove.* Files that other processes wrote into the old directory meanwhile are moved to the new one, and the old
   directory is removed. If the process is killed in this phase, NAME is the new directory; the next save removes the
   old one.

Directories are not exchanged on NFS, on systems other than Linux, if NAME is a mount point or the current directory or
contains a mount point, or if there are very many files. Then phases 2 and 3 are:

2. *Complete.* The new files, and a list of the files to remove, are synced to disk in a directory inside NAME. One
   rename then gives this directory its name ``NAME/.complete``. If the process is killed before it, NAME is unchanged.
3. *Move.* ``config.json`` is removed, so that nobody loads a mixture of old and new files. Obsolete files are removed,
   and the new files are renamed one by one, ``config.json`` last. If the process is killed in this phase, the next call
   of hfscale that reads or writes NAME finishes the move (:func:`finish_move`); until that call, transformers reports a
   missing ``config.json``.
"""

import ctypes
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from ...errors import CheckpointError
from . import directories

_INSIDE = ".incomplete"
_COMPLETE = ".complete"
_LIST = ".files"
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's file
# without these files no library loads the directory
_DOORS = ("config.json", ADAPTER_CONFIG)
_MOST_LINKS = 20_000  # making so many hard links takes about a second
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_log = logging.getLogger(__name__)


class NewFiles:
    """Hold new files for a directory in a staging directory, until :meth:`commit` moves all of them into the
    directory.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        finish_move(target)
        # The directory in which the caller writes the new files.
        self.path = target / _INSIDE if _stays(target) else directories.staging_of(target)
        self._lock = directories.make_staging(target, self.path)
        self._placed = False

    def commit(self, stale: Sequence[str]) -> None:
        """Move the new files into the target directory, and remove files of the target that match the patterns
        ``stale``.
        """
        new = sorted(path.name for path in self.path.iterdir())
        if blocked := [name for name in new if (self.target / name).is_dir()]:
            raise CheckpointError(
                f"{self.target / blocked[0]} is a directory, and a file is to be written there: remove the directory, "
                "or save to another directory"
            )
        for name in new:
            directories.sync(self.path / name)
        if not self.target.exists():
            directories.sync(self.path)
            self.path.rename(self.target)
            self._placed = True
            directories.sync(self.target.parent)
            return
        old = {
            path.name
            for pattern in stale
            for path in self.target.glob(pattern)
            if not path.is_dir()
        } - {*new}
        if self.path.parent == self.target or not self._exchange(
            {
                *new,
                *old,
                _INSIDE,
                _COMPLETE,
            }
        ):
            self._move(new, sorted(old))

    def close(self) -> None:
        """Remove the new files unless they were committed, and release the lock of the staging directory."""
        try:
            if not self._placed:
                with suppress(OSError):
                    directories.discard(self.path, self.target)
        finally:
            self._lock.release()

    def _exchange(self, replaced: Collection[str]) -> bool:
        """Let the staging directory and the target directory exchange their names; return whether this was possible.

        Files of the target stay in it, except those that are named in ``replaced``.
        """
        linked: dict[str, int] = {}
        try:
            _link(self.target, self.path, "", replaced, linked)
            _trade_names(self.path, self.target)
        except OSError as error:
            _log.info(
                "%s cannot be exchanged with the new directory (%s), so its files are moved one by one",
                self.target,
                error,
            )
            return False
        self._placed = True
        with suppress(OSError):  # the save is complete, even if removing the old directory fails
            directories.sync(self.target.parent)
            old = directories.discarded_of(self.path, self.target)
            self.path.rename(old)
            _hand_over(old, self.target, replaced, linked)
            shutil.rmtree(old, ignore_errors=True)
        return True

    def _move(self, new: list[str], old: list[str]) -> None:
        inside = self.target / _INSIDE
        if self.path != inside:
            shutil.rmtree(inside, ignore_errors=True)
            inside.mkdir()
            for name in new:
                # a copy if the two are on different file systems
                shutil.move(self.path / name, inside / name)
                directories.sync(inside / name)
        (inside / _LIST).write_text(json.dumps({"new": new, "old": old}))
        directories.sync(inside / _LIST)
        directories.sync(inside)
        shutil.rmtree(self.target / _COMPLETE, ignore_errors=True)
        inside.rename(self.target / _COMPLETE)
        self._placed = self.path == inside
        directories.sync(self.target)
        for name in {*_DOORS} & {*new}:
            (self.target / name).unlink(missing_ok=True)
        finish_move(self.target)


def finish_move(directory: str | Path) -> None:
    """Finish moving new files into ``directory`` if the process that was saving them was killed while it moved them.
    Several processes may call this at once.
    """
    target = Path(directory)
    source = target / _COMPLETE
    if not (source / _LIST).is_file() or source.is_symlink():
        return
    try:
        told = json.loads((source / _LIST).read_text())
        doors = {*_DOORS} & {*told["new"]}
        if doors and all((target / name).exists() for name in doors):
            return  # the move has not begun, has ended, or was followed by another save
        for name in [*told["old"], *told["new"]]:
            directories.check_inside(name, source / _LIST)
        for name in told["old"]:
            (target / name).unlink(missing_ok=True)
        for name in sorted(told["new"], key=lambda name: name in _DOORS):
            with suppress(FileNotFoundError):  # the file was moved already
                (source / name).replace(target / name)
        directories.sync(target)
    except FileNotFoundError:
        return  # another process was faster
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{target} holds an interrupted save, which could not be finished ({error}): run 'hfscale inspect "
            f"{target}', which finishes it, as a user who may write to the directory"
        ) from error
    shutil.rmtree(source, ignore_errors=True)


def _stays(target: Path) -> bool:
    """Return whether a complete new directory cannot take the name of ``target``, because ``target`` is or contains a
    mount point or the current directory, or its parent is not writable.
    """
    if not target.is_dir():
        return False
    with suppress(OSError):  # mount points, and directories that contain one, cannot be exchanged
        place = str(target).replace(" ", "\\040")
        if re.search(f" {re.escape(place)}[ /]", Path("/proc/self/mountinfo").read_text()):
            return True
    return directories.holds_current_directory(target) or not os.access(target.parent, os.W_OK)


def _link(
    source: Path,
    target: Path,
    within: str,
    left_out: Collection[str],
    linked: dict[str, int],
) -> None:
    """Hard-link the files of the directory ``source`` into ``target``, with its subdirectories, and record the files'
    inodes in ``linked``.

    Entries in ``left_out`` are skipped. Owner, mode and times of directories are copied.
    """
    with os.scandir(source) as found:
        entries = list(found)
    for entry in entries:
        name = os.path.join(within, entry.name)
        fresh = target / entry.name
        if name in left_out:
            continue
        if len(linked) > _MOST_LINKS:
            raise OSError(
                f"the directory has more than {_MOST_LINKS:,} files, too many to link one by one"
            )
        if not entry.is_dir(follow_symlinks=False):
            os.link(entry.path, fresh, follow_symlinks=False)
            linked[name] = entry.inode()
        else:
            fresh.mkdir()
            _link(source / entry.name, fresh, name, left_out, linked)
    there = source.stat()
    here = target.stat()
    if (there.st_uid, there.st_gid) != (here.st_uid, here.st_gid):
        os.chown(target, there.st_uid, there.st_gid)
    shutil.copystat(source, target)
    directories.sync(target)


def _trade_names(one: Path, other: Path) -> None:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError) as error:
        raise OSError(
            "this system cannot exchange two directories in one step (renameat2)"
        ) from error
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _hand_over(
    old: Path,
    new: Path,
    left_out: Collection[str],
    linked: dict[str, int],
) -> None:
    """Move to the directory ``new`` those files that other processes created or replaced in ``old`` after its files
    were hard-linked into ``new``; ``linked`` are the inodes of the linked files.
    """
    for folder, folders, files in os.walk(old):
        within = os.path.relpath(folder, old)
        folders[:] = [
            name for name in folders if os.path.normpath(os.path.join(within, name)) not in left_out
        ]
        (new / within).mkdir(parents=True, exist_ok=True)
        for file in [
            *files,
            *(name for name in folders if os.path.islink(os.path.join(folder, name))),
        ]:
            name = os.path.normpath(os.path.join(within, file))
            path = Path(folder, file)
            target = new / name
            if name in left_out or path.lstat().st_ino == linked.get(name):
                continue
            if not os.path.lexists(target) or target.lstat().st_ino == linked.get(name):
                path.replace(target)
