"""Write a directory aside, and move it into place when all of it is whole: on every rank, or on none."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..errors import CheckpointError
from ..mesh import Mesh
from .writing import is_writer, raise_together

_Result = TypeVar("_Result")


class Staging:
    """A directory that is being written.

    Attributes:
        path: where to write; it exists, for every rank.
        failure: what went wrong first on this rank.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: Exception | None = None

    def attempt(self, work: Callable[..., _Result], *arguments: object) -> _Result | None:
        """What ``work(*arguments)`` returns; ``None`` if it fails, or something has failed before.

        For a rank that others wait for in what comes next: it has to go on, and to say at the end what went wrong.
        """
        if self.failure is None:
            try:
                return work(*arguments)
            except (OSError, CheckpointError) as error:
                self.failure = error
        return None


@contextmanager
def atomic_directory(
    target: Path,
    mesh: Mesh | None = None,
    *,
    replace: bool = False,
    stale: Sequence[str] = (),
    last: str | None = None,
) -> Iterator[Staging]:
    """A directory to write in, which moves to ``target`` at the end unless something failed on some rank.

    Collective over ``mesh``, whose first rank makes the directory and moves it. What a killed process left is removed.
    A rank may raise ``OSError`` in it if it is not waited for there; otherwise it goes through :meth:`Staging.attempt`.

    Args:
        mesh: the ranks that write; ``None``: this process alone.
        replace: ``target`` as a whole is replaced. Otherwise each file replaces the one of its name.
        stale: patterns of files of ``target`` that go before the new ones come, and not otherwise.
        last: the file that moves when all others are in place.

    Raises:
        CheckpointError: on every rank, if one of them failed; ``target`` is then as it was before.
    """
    staging = Staging(target.with_name(f".{target.name}.incomplete") if replace else target / ".incomplete")
    writes = mesh is None or is_writer(mesh)
    try:
        if writes:
            staging.attempt(_make, staging.path)
        raise_together(mesh, staging.failure, target)
        try:
            yield staging
        except OSError as error:
            staging.failure = staging.failure or error
        raise_together(mesh, staging.failure, target)
        if writes:
            staging.attempt(_replace if replace else _move_files, staging.path, target, stale, last)
        raise_together(mesh, staging.failure, target)
    finally:
        if writes:
            shutil.rmtree(staging.path, ignore_errors=True)


def _make(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _move_files(source: Path, target: Path, stale: Sequence[str], last: str | None) -> None:
    for pattern in stale:
        for old in target.glob(pattern):
            old.unlink()
    for file in sorted(source.iterdir(), key=lambda file: (file.name == last, file.name)):
        file.replace(target / file.name)


def _replace(source: Path, target: Path, *_: object) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)
