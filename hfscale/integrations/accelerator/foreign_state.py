"""Resume from a directory of Accelerate's own ``save_state``, from any number of processes, plain or FSDP2-sharded.

::

    model.safetensors, pytorch_model.bin     or pytorch_model_fsdp_0/     the model's weights
    optimizer.bin                            or optimizer_0/              moments and groups
    scheduler.bin, scheduler_1.bin                                        schedules
    random_states_0.pkl                      RNG states: read if there are as many as distinct batches in a step
    sampler.bin                              the order of data: not read
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import load
from torch import nn

from ...checkpoint.foreign_optimizer import load_optimizer, read_state_dict
from ...checkpoint.load import load_weights
from ...checkpoint.random_states import place_among, restore_random_states, states_of_process
from ...distributed.files.sources import has_weights
from ...errors import CheckpointError
from ...train.runtime import Runtime, runtime_of
from ...train.runtime.writing import all_or_none

_log = logging.getLogger(__name__)
_STREAMS = "random_states"


def is_accelerates(directory: Path) -> bool:
    """Return whether Accelerate's ``save_state`` wrote a directory."""
    return any(directory.glob(f"{_STREAMS}_*.pkl")) and has_weights(directory)


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
        drawn = _restore_streams(runtime, directory)
    if runtime.mesh.rank == 0:
        _log.warning(
            "%s was written by Accelerate: weights, optimizer%s and schedules continue from it, but %sthe order of the "
            "data starts anew, so skip the batches that were seen (skip_first_batches)",
            directory,
            ", random streams" if drawn else "",
            "" if drawn else "random streams and ",
        )


def _restore_streams(runtime: Runtime, directory: Path) -> bool:
    """Restore the RNG states of Accelerate's process whose batches this rank gets; return whether they were restored.

    They are restored only if the directory has states of as many processes as there are distinct batches in a step
    (ranks that share a batch count once).
    """
    mesh = runtime.mesh
    if len(list(directory.glob(f"{_STREAMS}_*.pkl"))) != mesh.batch_world:
        return False
    # Accelerate's own ``load`` reads only the types on its list of allowed types.
    written = load(directory / f"{_STREAMS}_{mesh.batch_rank}.pkl", map_location="cpu")
    given = (written["random_state"], written["numpy_random_seed"], written["torch_manual_seed"])
    devices = written.get("torch_cuda_manual_seed") or [None]
    states = states_of_process(*given, devices[mesh.batch_rank % len(devices)])
    restore_random_states(mesh, states, place_among(mesh, of_batches=True))
    # Otherwise the first step would reseed all batches' streams except the first's.
    runtime.streams.agreed = True
    return True


def _read(path: Path) -> Any:
    if not path.exists():
        raise CheckpointError(
            f"{path} must exist to resume from {path.parent}, but does not: copy the whole directory again, or load "
            "only the weights (hfscale.from_pretrained)"
        )
    return read_state_dict(path)
