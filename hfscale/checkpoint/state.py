"""Save a run's state and resume from it: in the same layout bit by bit, in another one up to rounding.

Every rank writes its shards of weights, buffers and optimizer state, one replica of each, and its RNG states; nothing
is gathered. The position of each shard in the full tensor is written too, so that any other layout can read its own
shards from them::

    DIRECTORY/state.json                every tensor: its shape and cuts; layout, step (:mod:`.state_format`)
    DIRECTORY/rank-00000.safetensors    the shards that a rank wrote
    DIRECTORY/rank-00000.pt             its RNG states, the scheduler and other objects passed: plain data
    DIRECTORY/config.json               and the other config files of a Hugging Face checkpoint
    DIRECTORY/complete.json             sizes and checksums; comes last (:mod:`hfscale.distributed.files.complete`)
"""

import logging
import operator
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .._compat.accelerate import stock_optimizer
from ..distributed.files.directories import target_of
from ..errors import CheckpointError, check_count
from ..parallel.data import reshard
from ..parallel.tensor.part import RandomStreams
from ..train import guards
from ..train.runtime import Runtime, runtime_of
from ..train.runtime.writing import all_or_none, everyone_arrives, saving
from .background import apart, begin_save, on_host, wait_for_saves
from .state_directory import none_there, run_of
from .state_load import Resumed, load_from
from .state_save import take_state, write_state

_log = logging.getLogger(__name__)
_WAIT = timedelta(minutes=2)


@saving()
def save_state(
    model: nn.Module,
    directory: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    step: int | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    timeout: timedelta = _WAIT,
    check_replicas: bool = True,
    asynchronous: bool = False,
    **others: Any,
) -> None:
    """Write the state a run needs to continue, in this or any other layout; call it on every rank, between two steps.

    Whenever the process or the machine stops, a directory is a complete state or recognizably incomplete.

    Args:
        directory: of this state. A state in it is replaced once the new one is complete.
        optimizer: over parameters of ``model``.
        step: number of steps done, which :func:`load_state` returns.
        keep_last: remove other states of this run beside this one, except this many of the highest steps.
        keep_every: also keep states whose step this number divides.
        check_replicas: compare replicas of parameters bit by bit first.
        asynchronous: return once everything is copied to CPU memory, and write it during the steps that follow. The
            next save, :func:`load_state` and the end of the process wait for it, and raise if it failed; so does
            :func:`hfscale.wait_for_saves`.
        others: anything with ``state_dict`` and ``load_state_dict`` (``scheduler=...``, ``dataloader=...``), whose
            states are plain data. ``None`` is ignored.

    Raises:
        ConfigError: ``directory``, ``step``, ``keep_last`` or ``keep_every`` is impossible; nothing was written.
        CheckpointError: a rank did not call it, or could not write, replicas have drifted apart, or a schedule without
            a flush has microbatches in flight; ``directory`` is then unchanged.
    """
    runtime, target, call = runtime_of(model), target_of(directory), f"save_state({str(directory)!r})"
    count = _check_numbers(step, keep_last, keep_every)
    refuse_under_way(runtime, "save_state")
    everyone_arrives(runtime.mesh, timeout, call)
    if (streams := runtime.part(RandomStreams)) is not None:
        streams.synchronize(runtime)
    with all_or_none(runtime.mesh, f"{target} could not be written"):
        wait_for_saves()
        if check_replicas:
            guards.check_replicas(runtime, call)
        reshard(runtime.model)  # or weights that FSDP2 has gathered would be saved as shards
        given = _given(others)
        taken = take_state(runtime, stock_optimizer(optimizer), count, given)
        runtime.run = runtime.run or uuid.uuid4().hex
        if asynchronous:
            taken.held = on_host(taken.held)
    if asynchronous:
        taken.mesh = apart(taken.mesh)
        begin_save(str(target), lambda: write_state(taken, target, keep_last, keep_every))
    else:
        write_state(taken, target, keep_last, keep_every)


def load_state(
    model: nn.Module,
    directory: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
    missing_ok: bool = False,
    **others: Any,
) -> Resumed:
    """Restore a run from a state of :func:`save_state`: weights, buffers, optimizer, RNG states, ``others``.

    Call it on every rank, with a model built as it was then, in any layout. In the same layout the run continues bit by
    bit; in another one up to rounding, and with other dropout masks.

    Args:
        directory: of a state; or of several states, of which the newest complete one is loaded.
        verify: compare every file's checksum first; all ranks together read each file once more.
        missing_ok: return step 0 if there is no state at all, for the first start of a job that restarts itself.

    Returns:
        the loaded state's directory and ``step``; step 0 if there is none.

    Raises:
        CheckpointError: there is no complete state, or it is of another model or optimizer; nothing was changed then.
    """
    runtime = runtime_of(model)
    refuse_under_way(runtime, "load_state")
    with all_or_none(runtime.mesh, f"{directory} could not be loaded"):
        wait_for_saves()
        if missing_ok and none_there(Path(directory), runtime.mesh):
            return Resumed(None, 0, runtime.mesh.batch_world, True)
        reshard(runtime.model)
        resumed = load_from(runtime, Path(directory), stock_optimizer(optimizer), _given(others), verify)
        if resumed.directory is not None:
            runtime.run = run_of(resumed.directory)
        return resumed


def refuse_under_way(runtime: Runtime, call: str) -> None:
    """Raise CheckpointError if the executor has microbatches in flight, whose gradients would be lost."""
    if runtime.executor.under_way:
        raise CheckpointError(
            f"{call} would lose the microbatches that {runtime.mesh.layout.pipeline_schedule} has in flight: "
            "take their gradients first (for loss in hfscale.drain(model): optimizer.step())"
        )


def _check_numbers(step: Any, keep_last: object, keep_every: object) -> int | None:
    """Check the numbers and return the step as an int."""
    if hasattr(step, "__index__") and not isinstance(step, bool):
        with suppress(TypeError):
            step = operator.index(step)  # of a tensor, say
    for name, count, least in (("step", step, 0), ("keep_last", keep_last, 1), ("keep_every", keep_every, 1)):
        if count is not None:
            check_count(name, count, least)
    return step


def _given(others: dict[str, Any]) -> dict[str, Any]:
    """Return the objects that have a state; warn of dataloaders without one."""
    found = {}
    for name, other in others.items():
        has_state = hasattr(other, "state_dict") and hasattr(other, "load_state_dict")
        # Accelerate's loaders always have the methods; this attribute tells whether they work.
        if has_state and getattr(other, "use_stateful_dataloader", True):
            found[name] = other
        elif isinstance(other, DataLoader):
            _log.warning(
                "%s, a torch.utils.data.DataLoader, has no state_dict, so its position is not saved: skip the "
                "batches of the steps done (accelerate.skip_first_batches), or use torchdata's StatefulDataLoader",
                name,
            )
        elif other is not None:
            raise CheckpointError(f"{name}={type(other).__name__} has no state_dict and load_state_dict: leave it out")
    return found
