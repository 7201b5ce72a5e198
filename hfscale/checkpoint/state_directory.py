"""Write states to a staging directory, mark them complete, move them into place, and find them for a resume.

::

    .NAME.incomplete    where all ranks write (:mod:`hfscale.distributed.files.directories`); marked when complete
    NAME                its final name
    .NAME.old           the previous NAME, until the new one is in its place

If a save is killed at any moment, a complete state remains: NAME, or, between the two renames, .NAME.old.

Every state has the id of the run that wrote it, and a run that resumes from the state continues with this id. So one
directory may contain states of several runs. The newest state is the state with the highest step of the run that wrote
last; a run removes only its own states.
"""

import functools
import logging
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from ..config.environment import RUN
from ..distributed.files import complete, directories
from ..distributed.files.replace import ADAPTER_CONFIG
from ..distributed.files.sources import form_of, written_elsewhere
from ..distributed.mesh import Mesh
from ..errors import CheckpointError
from .state_format import INDEX

LATEST = "latest"
_NOTES = {
    ".log",
    ".txt",
    ".out",
    ".err",
    ".md",
    ".csv",
    ".json",
    ".jsonl",
    ".yaml",
    ".yml",
    ".toml",
    ".py",
    ".sh",
    ".html",
    ".png",
    ".svg",
    ".wandb",
}
_log = logging.getLogger(__name__)
_warn_once = functools.lru_cache(_log.warning)


class NewState:
    """Manage a state directory while it is written at ``path``, on the rank that creates it."""

    def __init__(self, target: Path) -> None:
        self.target, self.path = target, directories.staging_of(target)
        _refuse_other(target)
        self._lock = directories.make_staging(target, self.path)

    def commit(
        self,
        files: dict[str, complete.FileSum],
        step: int | None,
        run: str,
    ) -> None:
        """Mark the state complete when all of its ``files`` are on disk, and replace the target by the state."""
        target = self.target
        old = old_of(self.target)
        complete.mark_complete(self.path, files, step, run)
        # The only complete state may be the old one, so keep it.
        if target.exists() and problems_of(target):
            directories.discard(target, target)
        elif target.exists():
            _remove(old, target)
            target.rename(old)
        self.path.rename(target)
        directories.sync(target.parent)
        self._lock.release()
        with suppress(OSError):  # ignore errors: the new state is already in place
            _remove(old, target)

    def give_up(self) -> None:
        """Remove the staging directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def old_of(target: Path) -> Path:
    """Return the path to which an old state is moved until the new state is in its place."""
    target = Path(os.path.abspath(target))
    return target.parent / f".{target.name}.old"


def _remove(old: Path, target: Path) -> None:
    if old.is_symlink():
        old.unlink()
    elif old.exists():
        directories.discard(old, target)


def _refuse_other(target: Path) -> None:
    """Raise :class:`CheckpointError` if a new state would replace a directory that is not a state."""
    if directories.holds_current_directory(target):
        raise CheckpointError(
            "the state's directory must not be or contain the current directory, because saving replaces it, got "
            f"{target}: give a directory of its own, such as {target / 'step-100'}"
        )
    if target.is_dir() and not _is_state(target):
        others = sorted(path.name for path in target.iterdir())
        if others:
            raise CheckpointError(
                f"{target} has other files ({', '.join(others[:3])}), which a state would replace: give a directory "
                f"of its own, such as {target / 'step-100'}"
            )


def problems_of(directory: Path) -> list[str]:
    """Return why a directory is incomplete, without reading its files' contents."""
    try:
        return complete.size_problems(directory, complete.read_mark(directory))
    except CheckpointError as error:
        return [str(error)]


def states_in(source: Path) -> list[Path]:
    """Return the directories of the states in ``source``, complete or not, newest first: ``source`` itself if it is a
    state, otherwise all states in it. States of the run that wrote last come before those of other runs.
    """
    source = _parent_of_latest(source)
    if _is_state(source) or _is_state(old_of(source)):
        return [path for path in (source, old_of(source)) if _is_state(path)]
    inside = [path for path in source.iterdir() if _is_state(path)] if source.is_dir() else []
    inside = [path for path in inside if not path.name.startswith(".") or path.suffix == ".old"]
    marks = {path: mark_of(path) for path in inside}
    return sorted(
        inside,
        key=lambda path: age(marks[path], *marks.values()),
        reverse=True,
    )


def candidates(source: Path) -> list[Path]:
    """Return the directories of the complete states in ``source``, newest first, and warn once of incomplete states.
    Raise :class:`CheckpointError` if there is no complete state.
    """
    states = states_in(source)
    source = _parent_of_latest(source)
    marked = [
        path
        for path in states
        if any((path / name).exists() for name in (complete.MARK, "layout.json"))
    ]
    own = old_of(source).with_suffix(".incomplete")
    passed = [path for path in states if path not in marked] + ([own] if own.is_dir() else [])
    passed += source.glob(".*.incomplete")
    why = "cannot be used: the save was interrupted, or is still running"
    words = "; ".join(f"{path} {why}" for path in passed)
    if passed:
        _warn_once("%s", words)
    if not marked and passed:
        raise CheckpointError(
            f"{words}: there is no complete state in {source}: give another directory, or start the run without "
            "loading a state"
        )
    if not marked:
        holds = "" if (other := _held_by(source)) is None else f". It holds {other}"
        raise CheckpointError(
            f"{source} is not a state of hfscale.save_state and contains none: give the directory of "
            f"a state, or its parent{holds}"
        )
    return marked


def _held_by(source: Path) -> str | None:
    """Describe the weights in a directory that has no state of a run: their format, and the function that reads them.
    Return ``None`` if the directory has no weights in a known format.
    """
    if (source / ADAPTER_CONFIG).exists():
        return "an adapter: hfscale.from_pretrained(BASE, peft_config=...) reads it"
    if (form := form_of(source)) is not None:
        return f"weights ({form}), and no state of a run: hfscale.from_pretrained reads them, at step 0"
    return written_elsewhere(source)


def _refuse_other_files(source: Path) -> None:
    """Raise :class:`CheckpointError` if a run would begin in a directory that has no state but other files, which may
    be another trainer's checkpoint. Notes, logs and the remains of interrupted saves are allowed.
    """
    if not source.exists():
        return
    if (held := _held_by(source)) is not None:
        raise CheckpointError(
            f"missing_ok=True is for a directory with states, or one that is empty or does not exist yet, but {source} "
            f"has no state of hfscale.save_state: it has {held}. To begin at step 0 anyway, name another directory"
        )
    files = (Path(folder, name) for folder, _, names in os.walk(source) for name in names)
    strange = next((file for file in files if not _may_lie_beside(file.relative_to(source))), None)
    if strange is not None:
        raise CheckpointError(
            f"missing_ok=True is for a directory with states, or one that is empty or does not exist yet, but {source} "
            f"has no state of hfscale.save_state and has other files ({strange.relative_to(source)}, for example): "
            f"name a directory for states alone, such as {source / 'states'}"
        )


def _may_lie_beside(path: Path) -> bool:
    """Return whether a directory without states may contain the file ``path``, if a run begins in the directory: a
    hidden file, a log or note, the file with the name of the run, or a file of an interrupted save.
    """
    hidden = any(part.startswith(".") and part != ".metadata" for part in path.parts)
    return hidden or path.suffix in _NOTES or path.name == RUN or "tfevents" in path.name


def none_there(source: Path, mesh: Mesh) -> bool:
    """Return whether the first rank finds no complete state in ``source``; all ranks return the same answer."""
    states: list[Path] = []
    if mesh.is_first:
        with suppress(CheckpointError):
            states = candidates(source)
    return not mesh.all_gather_object(states)[0]


def none_to_resume(source: Path, mesh: Mesh) -> bool:
    """Return the result of :func:`none_there`, for a run that begins at step 0 if there is no state.

    Raises:
        CheckpointError: on the first rank, if ``source`` has no state but other weights or files.
    """
    if mesh.is_first and not states_in(source):
        _refuse_other_files(_parent_of_latest(source))
    return none_there(source, mesh)


def find_whole(source: Path, mesh: Mesh, verify: bool) -> Path:
    """Return the newest complete state for ``source``, the same on every rank; raise if there is no complete state."""
    names = [os.path.relpath(path, source) for path in candidates(source)] if mesh.is_first else []
    wrong: dict[Path, list[str]] = {}
    for name in mesh.all_gather_object(names)[0]:
        directory = Path(os.path.normpath(source / name))
        problems = mesh.all_gather_object(problems_of(directory) if mesh.is_first else [])[0]
        if not problems and verify:
            problems = [
                told_names
                for told in mesh.all_gather_object(_changed(directory, mesh))
                for told_names in told
            ]
        if not problems:
            if wrong and mesh.is_first:
                _log.warning("%s. Resuming from the state %s instead", _listed(wrong), directory)
            return directory
        wrong[directory] = problems
    raise CheckpointError(
        f"{_listed(wrong)}: there is no complete state in {source}: give another directory, or start the run without "
        "loading a state"
    )


def _changed(directory: Path, mesh: Mesh) -> list[str]:
    """Return descriptions of the files of a state whose contents do not match their checksums; each rank checks some of
    the files.
    """
    try:
        mark = complete.read_mark(directory)
    except CheckpointError as error:
        return [f"{error} (as rank {mesh.rank} sees it)"]
    return complete.content_problems(
        directory, mark, sorted(mark.files)[mesh.rank :: mesh.layout.total_size]
    )


def _listed(wrong: dict[Path, list[str]]) -> str:
    return "; ".join(
        f"{path} cannot be used: {', '.join(problems)}" for path, problems in wrong.items()
    )


def _parent_of_latest(source: Path) -> Path:
    """Return the parent of ``.../latest`` if ``latest`` does not exist; return any other path unchanged."""
    return source.parent if source.name == LATEST and not source.exists() else source


def _is_state(path: Path) -> bool:
    hidden = path.name.startswith(".")
    return not (hidden and path.is_symlink()) and any(
        (path / n).exists() for n in (INDEX, complete.MARK, "layout.json")
    )


def mark_of(directory: Path) -> complete.Mark:
    """Return the contents of the marker file that makes a directory a complete state; without one, a marker with time
    0.
    """
    try:
        return complete.read_mark(directory)
    except CheckpointError:
        return complete.Mark(0.0, {})


def age(mark: complete.Mark, *among: complete.Mark) -> tuple[bool, int, float]:
    """Return a sort key of a state from its marker: states of the run that wrote last come after those of other runs,
    and are ordered by step. ``among`` are the markers of all states.
    """
    last = max(among, key=lambda each: each.written).run
    return mark.run == last, -1 if mark.step is None else mark.step, mark.written


def run_of(directory: Path) -> str:
    """Return the id of a run that resumes from the state in ``directory``: the id of the run that wrote the state. If
    that run has later states, return a new id, so that the two runs stay distinguishable.
    """
    try:
        mark = complete.read_mark(directory)
        whole = [
            path
            for path in directory.parent.iterdir()
            if path.name[0] != "." and not problems_of(path)
        ]
        further = mark.step is not None and any(
            each.run == mark.run and (each.step or 0) > mark.step for each in map(mark_of, whole)
        )
    except (OSError, CheckpointError):
        return uuid.uuid4().hex
    return uuid.uuid4().hex if mark.run is None or further else mark.run


def prune(
    newest: Path,
    run: str,
    keep_last: int | None,
    keep_every: int | None,
) -> None:
    """Remove states of ``run`` in the directory of ``newest``, except the last ``keep_last`` states and states whose
    step is a multiple of ``keep_every``.
    """
    if keep_last is None:
        return
    beside = [path for path in newest.parent.iterdir() if path != newest and not path.is_symlink()]
    marks = {path: mark_of(path) for path in beside if not problems_of(path)}
    own = {path: mark for path, mark in marks.items() if mark.run == run}
    order = sorted(
        own,
        key=lambda path: (
            not path.name.startswith("."),
            *age(own[path], *own.values()),
        ),
        reverse=True,
    )
    for path in order[keep_last - 1 :]:
        step = own[path].step
        if keep_every and step is not None and step % keep_every == 0:
            continue
        (path / complete.MARK).unlink(
            missing_ok=True
        )  # unmark it first, because removing the files takes time
        directories.sync(path)
        directories.discard(path, path)
    for path in newest.parent.glob(".*.????????.discarded"):
        shutil.rmtree(path, ignore_errors=True)
    for path in newest.parent.glob(".*.incomplete"):
        try:
            lock = directories.DirectoryLock(path)
        except (CheckpointError, OSError):  # another job is writing the state, or has moved it
            continue
        if lock.held:
            shutil.rmtree(path, ignore_errors=True)
        lock.release()
