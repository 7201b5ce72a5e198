"""What every rank has to do together around files: arrive, let one rank write, and hear whether it could."""

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


def report(mesh: Mesh, failure: Exception | None, target: Path) -> None:
    """Every rank learns whether rank 0 succeeded."""
    message = [f"{type(failure).__name__}: {failure}" if failure else ""]
    if mesh.control is not None:
        dist.broadcast_object_list(message, src=0, group=mesh.control)
    if message[0]:
        raise CheckpointError(f"{target} could not be written: {message[0]}") from failure
