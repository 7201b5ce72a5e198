"""Write a directory in a temporary place and move it into place when it is complete: on every rank, or on none."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ...distributed.files.directories import target_of
from ...distributed.files.replace import NewFiles
from ...distributed.mesh import Mesh
from .writing import all_or_none, is_writer

_Result = TypeVar("_Result")


class Staging:
    """A directory that is being written.

    Attributes:
        path: where to write; it exists, for every rank.
        failure: the first exception on this rank.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: Exception | None = None

    def attempt(self, work: Callable[..., _Result], *arguments: object) -> _Result | None:
        """Return ``work(*arguments)``; ``None`` if it fails or something has failed before.

        Lets a rank that others wait for continue with the collectives that follow, and report its failure at the end.
        """
        if self.failure is None:
            try:
                return work(*arguments)
            except Exception as error:
                self.failure = error
        return None


@contextmanager
def atomic_directory(directory: Any, mesh: Mesh | None = None, *, stale: Sequence[str] = ()) -> Iterator[Staging]:
    """Write files to a temporary directory inside the `with` block, and move them to ``directory`` if no rank failed.

    Collective over ``mesh``, whose first rank makes the directory and moves it
    (:mod:`hfscale.distributed.files.replace`). A rank may raise in the block if no other rank waits for it there;
    otherwise it uses :meth:`Staging.attempt`.

    Args:
        mesh: the ranks that write; ``None``: this process alone.
        stale: patterns of existing files to delete when the new ones are moved in. Others stay.

    Raises:
        ConfigError: ``directory`` cannot be written.
        CheckpointError: on every rank, if one of them failed; the directory is then as it was before.
    """
    target = target_of(directory)
    staging, new = Staging(target), None
    with all_or_none(mesh, f"{target} could not be written"):
        try:
            if mesh is None or is_writer(mesh):
                new = NewFiles(target)
                staging.path = new.path
            if mesh is not None:
                staging.path = mesh.all_gather_object(staging.path)[0]
            yield staging
            if staging.failure is not None:
                raise staging.failure
            if mesh is not None:
                mesh.all_gather_object(None)  # every rank is done
            if new is not None:
                new.commit(stale)
        finally:
            if new is not None:
                new.close()
