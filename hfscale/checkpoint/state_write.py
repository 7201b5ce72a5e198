"""Write a state that was taken: every rank its file, and rank 0 what all of them agree on."""

from pathlib import Path

from ..errors import CheckpointError
from ..files.complete import FileSum, write_synced
from ..files.directories import staging_of
from ..files.writer import write_tensors
from ..runtime.writing import is_writer, raise_together
from .state_agree import agreed_index
from .state_directory import NewState, prune
from .state_index import INDEX, StateIndex, rest_name, weights_name
from .state_take import TakenState


def write_state(taken: TakenState, target: Path, keep_last: int | None, keep_every: int | None) -> None:
    """Write what was taken to ``target``; collective.

    Raises:
        CheckpointError: on every rank, if one could not; what ``target`` held is then still there.
    """
    mesh, run, new = taken.mesh, taken.runtime.run, None
    failure: Exception | None = None
    try:
        if is_writer(mesh):
            try:
                new = NewState(target)
            except (OSError, CheckpointError) as error:
                failure = error
        raise_together(mesh, failure, target)
        index = agreed_index(taken)
        files: dict[str, FileSum] = {}
        try:
            files = _write_own(taken, index, staging_of(target))
        except (OSError, CheckpointError) as error:
            failure = error
        every = mesh.all_gather_object({name: (file.size, file.crc) for name, file in files.items()})
        raise_together(mesh, failure, target)
        if new is not None:
            try:
                new.commit({n: FileSum(*sums) for rank in every for n, sums in rank.items()}, taken.step, run)
                new = None
                prune(target, run, keep_last, keep_every)
            except (OSError, CheckpointError) as error:
                failure = error
        raise_together(mesh, failure, target)
    finally:
        if new is not None:
            new.give_up()


def _write_own(taken: TakenState, index: StateIndex, directory: Path) -> dict[str, FileSum]:
    """Write this rank's files; they are on the disk afterwards."""
    rank = index.rank_of((), taken.mesh.ranks)
    files = {rest_name(rank): write_synced(directory / rest_name(rank), taken.rest)}
    if taken.contents.held:
        files[weights_name(rank)] = write_tensors(directory / weights_name(rank), taken.contents.held)
    if is_writer(taken.mesh):
        for name, content in {INDEX: index.write(), **taken.beside}.items():
            files[name] = write_synced(directory / name, content)
    return files
