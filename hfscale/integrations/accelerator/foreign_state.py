"""Go on from a directory of Accelerate's own ``save_state``, of any number of processes, plain or sharded by FSDP2::

model.safetensors, pytorch_model.bin     or pytorch_model_fsdp_0/     the model's weights
optimizer.bin                            or optimizer_0/              moments and groups
scheduler.bin, scheduler_1.bin                                        schedules
random_states_0.pkl, sampler.bin                                      streams of its processes: not read
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...checkpoint.foreign_optimizer import load_optimizer, read_state_dict
from ...checkpoint.load_weights import load_weights
from ...distributed.files.sources import has_weights
from ...errors import CheckpointError
from ...train.runtime import runtime_of
from ...train.runtime.writing import all_or_none

_log = logging.getLogger(__name__)


def is_accelerates(directory: Path) -> bool:
    """Return whether a directory is what Accelerate's ``save_state`` wrote."""
    return any(directory.glob("random_states_*.pkl")) and has_weights(directory)


def load_accelerates(
    model: nn.Module, directory: Path, optimizer: Any, schedulers: Sequence[Any]
) -> None:
    """Load weights, the optimizer's state and those of schedules on every rank, which takes its shards.

    Raises:
        CheckpointError: it has states of other parameters, or lacks some.
    """
    runtime = runtime_of(model)
    load_weights(model, directory)
    if optimizer is not None:
        load_optimizer(model, optimizer, directory)
    with all_or_none(runtime.mesh, f"{directory} could not be loaded"):
        for number, scheduler in enumerate(schedulers):
            name = f"scheduler_{number}.bin" if number else "scheduler.bin"
            scheduler.load_state_dict(_read(directory / name))
    if runtime.mesh.rank == 0:
        _log.warning(
            "%s is Accelerate's: weights, optimizer and schedules go on from it; random streams and the order of data "
            "begin anew, so skip the batches that were seen (skip_first_batches)",
            directory,
        )


def _read(path: Path) -> Any:
    if not path.exists():
        raise CheckpointError(
            f"{path} must be there to go on from {path.parent}, and is not: load the weights alone "
            "(hfscale.from_pretrained), or copy the directory again"
        )
    return read_state_dict(path)
