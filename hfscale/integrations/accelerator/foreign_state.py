"""Resume from a directory of Accelerate's own ``save_state``, from any number of processes, plain or FSDP2-sharded::

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
    """Return whether Accelerate's ``save_state`` wrote a directory."""
    return any(directory.glob("random_states_*.pkl")) and has_weights(directory)


def load_accelerates(
    model: nn.Module, directory: Path, optimizer: Any, schedulers: Sequence[Any]
) -> None:
    """Load weights, the optimizer's state and the schedules' states; every rank reads its shards.

    Raises:
        CheckpointError: the directory has states of other parameters, or lacks files.
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
            "%s was written by Accelerate: weights, optimizer and schedules continue from it, but random streams and "
            "the order of the data start anew, so skip the batches that were seen (skip_first_batches)",
            directory,
        )


def _read(path: Path) -> Any:
    if not path.exists():
        raise CheckpointError(
            f"{path} must exist to resume from {path.parent}, but does not: load the weights alone "
            "(hfscale.from_pretrained), or copy the directory again"
        )
    return read_state_dict(path)
