"""Directories of a Trainer's checkpoints: check, write atomically, and rotate them.

::

    checkpoint-N/               complete: it appears by one rename, once all of its bytes are on the disk
    .incomplete/checkpoint-N/   while it is written; old ones are removed there, too
    .replaced/checkpoint-N/     an older one of the same name, until the new one is in its place
"""

import json
import logging
import os
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from transformers.trainer import TRAINER_STATE_NAME

from ...distributed.files.complete import read_mark, size_problems
from ...distributed.files.directories import sync_directory
from ...distributed.files.reader import SafetensorsFile
from ...distributed.files.writer import INDEX, REPLACED
from ...distributed.mesh import Mesh
from ...errors import CheckpointError
from ...train.runtime.writing import is_writer

STATE = "hfscale_state"
ASIDE, _REPLACED = ".incomplete", ".replaced"
_OWN = (*REPLACED, "*.pt", "*.pth", STATE)  # files of an old checkpoint that must not be mixed with a new one's
_UNFINISHED = f"has no {TRAINER_STATE_NAME}, which is written last"
_MOST_READ = 16 << 20  # bytes of a file whose checksums are compared before a run goes on from it
_log = logging.getLogger(__name__)


def has_state(checkpoint: Path) -> bool:
    """Return whether the checkpoint holds a training state written by hfscale."""
    return (checkpoint / STATE).is_dir()


def resumed_from(resume: Any, output: Path, mesh: Mesh) -> Any:
    """Return the checkpoint to resume from, the newest complete one for ``True``; the same on every rank.

    Args:
        resume: Trainer's ``resume_from_checkpoint``.
        output: the directory with the checkpoints.

    Returns:
        ``None`` if the run was killed during its first save, so that there is none.

    Raises:
        CheckpointError: on every rank: the requested checkpoint is not complete, or none is.
    """
    if not isinstance(resume, str | Path) and resume is not True:
        return resume
    found: Any = resume
    problem = ""
    if is_writer(mesh):
        try:
            found = _newest_whole(output) if resume is True else _whole(Path(resume))
        except (OSError, CheckpointError) as error:
            problem = str(error)
    found, problem = mesh.all_gather_object((found, problem))[0]
    if problem:
        raise CheckpointError(problem)
    return found


def problem_of(checkpoint: Path) -> str | None:
    """Return a checkpoint's defect, in words that follow its name; no large file is read."""
    if not (checkpoint / TRAINER_STATE_NAME).exists():
        return _UNFINISHED
    path = checkpoint / TRAINER_STATE_NAME
    try:
        int(json.loads(path.read_bytes())["global_step"])
        if has_state(checkpoint):
            path = checkpoint / STATE
            for each in size_problems(path, read_mark(path)):
                raise CheckpointError(each)
        weights = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*model*.bin")]
        if not weights and not has_state(checkpoint):
            return "has no weights"
        for path in sorted({*weights, *checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("*.bin")}):
            _check_readable(path)
        if (path := checkpoint / INDEX).exists():
            missing = {*json.loads(path.read_bytes())["weight_map"].values()} - {each.name for each in weights}
            if missing:
                return f"lacks {min(missing)}"
    except (OSError, ValueError, LookupError, TypeError, BadZipFile, CheckpointError) as error:
        return f"has a damaged {path.name} ({error})"
    return None


def _check_readable(path: Path) -> None:
    """Read the table of contents of a file, and the checksums of a small one."""
    if path.suffix == ".safetensors":
        SafetensorsFile(path)
        return
    with ZipFile(path) as file:
        damaged = file.testzip() if path.stat().st_size <= _MOST_READ else None
    if damaged:
        raise BadZipFile(f"the checksum of {damaged} differs")


def _checkpoints(output: Path) -> list[Path]:
    """Return the directories that Trainer takes for checkpoints, in the order of their steps."""
    inside = output.iterdir() if output.is_dir() else ()
    found = [path for path in inside if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[-1])


def _newest_whole(output: Path) -> str | bool | None:
    finish_replacing(output)
    problems: dict[Path, str] = {}
    for path in reversed(_checkpoints(output)):
        problem = problem_of(path)
        if problem is None:
            if problems:
                _log.warning("resume_from_checkpoint=True goes on from %s: %s", path, _listed(problems))
            return str(path)
        problems[path] = problem
    if {*problems.values()} - {_UNFINISHED}:
        raise CheckpointError(f"{output} has no complete checkpoint: {_listed(problems)}")
    if not problems and not (output / ASIDE).exists():
        return True  # Trainer refuses it
    _log.warning("%s has no whole checkpoint, as its first save was stopped: training begins at step 0", output)
    return None


def _listed(problems: dict[Path, str]) -> str:
    return "; ".join(f"{path} {problem}" for path, problem in problems.items())


def _whole(checkpoint: Path) -> str:
    if not checkpoint.is_dir():
        raise CheckpointError(f"resume_from_checkpoint={str(checkpoint)!r} must be a directory, and there is none")
    problem = problem_of(checkpoint)
    if problem is None:
        return str(checkpoint)
    whole = [path for path in _checkpoints(checkpoint.parent) if problem_of(path) is None]
    advice = f"resume_from_checkpoint={str(whole[-1])!r} is whole" if whole else "there is no whole one beside it"
    raise CheckpointError(f"{checkpoint} cannot be used: it {problem}; {advice}")


def make_empty(path: Path) -> None:
    """Make an empty directory, removing what a killed process left there."""
    remove(path)
    path.mkdir(parents=True)


def remove(path: Path) -> None:
    """Remove a directory, or a link to one, but not what it links to."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def put_in_place(source: Path, target: Path) -> None:
    """Sync a checkpoint to the disk, and rename it to ``target``."""
    for directory, _, names in os.walk(source):
        for name in names:
            with (Path(directory) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(directory))
    if target.exists():
        replaced = target.parent / _REPLACED
        replaced.mkdir(exist_ok=True)
        target.rename(replaced / target.name)
    source.rename(target)
    sync_directory(target.parent)
    finish_replacing(target.parent)


def finish_replacing(output: Path) -> None:
    """Remove replaced checkpoints, moving foreign files to the new one; restore one if there is no new one."""
    replaced = output / _REPLACED
    if replaced.is_symlink() or not replaced.is_dir():
        return
    for old in replaced.iterdir():
        if not (output / old.name).exists():
            old.rename(output / old.name)
            continue
        for file in old.iterdir():
            known = any(fnmatch(file.name, pattern) for pattern in _OWN)
            if not known and not (output / old.name / file.name).exists():
                file.rename(output / old.name / file.name)
    remove(replaced)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Keep ``limit`` complete checkpoints up to ``newest``, including it and the best one, and remove the others.

    Checkpoints of later steps belong to another run and stay. Incomplete ones are removed, and not counted.
    """
    if limit is None or limit <= 0:
        return
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    older = [path for path in _checkpoints(newest.parent) if _step(path) < _step(newest)]
    rest = [path for path in older if path.resolve() not in kept]
    whole = [path for path in rest if problem_of(path) is None]
    room = max(0, limit - len(kept))
    staying = whole[len(whole) - room :]
    for path in rest:
        if path not in staying:
            aside = newest.parent / ASIDE
            aside.mkdir(exist_ok=True)
            path.rename(aside / path.name)
            remove(aside)
