"""Write a state that was taken: every rank its file, and rank 0 the common index."""

from pathlib import Path

from ..distributed.files.complete import FileSum, write_synced
from ..distributed.files.directories import staging_of
from ..distributed.files.writer import write_tensors
from ..train.runtime.writing import all_or_none, is_writer, not_finite, warn_of_not_finite
from .state_agree import agreed_index
from .state_directory import NewState, prune
from .state_index import INDEX, StateIndex, rest_name, weights_name
from .state_take import TakenState


def write_state(taken: TakenState, target: Path, keep_last: int | None, keep_every: int | None) -> None:
    """Write a taken state to ``target``; collective.

    Raises:
        CheckpointError: on every rank, if one could not; ``target`` is then unchanged.
    """
    mesh, run, new = taken.mesh, taken.runtime.run, None
    with all_or_none(mesh, f"{target} could not be written"):
        try:
            if is_writer(mesh):
                new = NewState(target)
            index = agreed_index(taken)  # collective, so the directory exists for every rank afterwards
            every = mesh.all_gather_object(_write_own(taken, index, staging_of(target)))
            if new is not None:
                new.commit({name: file for rank in every for name, file in rank.items()}, taken.step, run)
                new = None
            numbers = {key: share for key, share in taken.contents.held.items() if not key.startswith("buffers/")}
            warn_of_not_finite(mesh, not_finite(numbers), str(target))
        finally:
            if new is not None:
                new.give_up()
    with all_or_none(mesh, f"{target} is written, and older states beside it could not be removed"):
        if is_writer(mesh):
            prune(target, run, keep_last, keep_every)


def _write_own(taken: TakenState, index: StateIndex, directory: Path) -> dict[str, FileSum]:
    """Write this rank's files and fsync them."""
    rank = index.rank_of((), taken.mesh.ranks)
    files = {rest_name(rank): write_synced(directory / rest_name(rank), taken.rest)}
    if taken.contents.held:
        files[weights_name(rank)] = write_tensors(directory / weights_name(rank), taken.contents.held)
    if is_writer(taken.mesh):
        for name, content in {INDEX: index.write(), **taken.beside}.items():
            files[name] = write_synced(directory / name, content)
    return files
