"""What every rank has to do together around files: arrive, let one rank write, and hear whether all could."""

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..errors import CheckpointError
from ..mesh import Mesh


def is_writer(mesh: Mesh) -> bool:
    """Whether this rank writes files: the first one."""
    return not any(mesh.ranks.values())


def everyone_arrives(mesh: Mesh, timeout: timedelta, call: str) -> None:
    """Wait for every rank to make the same ``call``.

    Raises:
        CheckpointError: one did not within ``timeout``.
    """
    if mesh.control is None:
        return
    try:
        dist.monitored_barrier(mesh.control, timeout=timeout)
    except RuntimeError as error:
        raise CheckpointError(
            f"{call} is a collective call, and not every rank made it within "
            f"{timeout.total_seconds():.0f} s: call it on all {mesh.layout.total_size} ranks (not only on the main "
            f"process). Nothing was written. {error}"
        ) from error


def raise_together(mesh: Mesh | None, failure: Exception | None, target: Path) -> None:
    """Every rank learns of every rank's ``failure`` to write ``target``; ``mesh=None``: there is this process alone.

    Raises:
        CheckpointError: on every rank, if one of them failed.
    """
    failures = [str(failure or "")] if mesh is None else mesh.all_gather_object(str(failure or ""))
    if any(failures):
        several = len(failures) > 1
        reasons = (f"rank {rank}: {text}" if several else text for rank, text in enumerate(failures) if text)
        raise CheckpointError(f"{target} could not be written: {'; '.join(reasons)}") from failure
