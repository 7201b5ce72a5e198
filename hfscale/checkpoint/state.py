"""Save a run's state and resume from it: in the same layout bit by bit, in another one up to rounding.

Every rank writes its shards of weights, buffers and optimizer state, and its RNG states; of each shard, one replica is
written, and nothing is gathered. The position of each shard in the full tensor is written, too, so that any other
layout can read its own shards from the written shards::

    DIRECTORY/state.json                every tensor: its shape and cuts; layout, step (:mod:`.state_format`)
    DIRECTORY/rank-00000.safetensors    the shards that a rank wrote
    DIRECTORY/rank-00000.pt             its RNG states, the scheduler and other objects passed: plain data
    DIRECTORY/config.json               and the other config files of a Hugging Face checkpoint
    DIRECTORY/complete.json             sizes and checksums; comes last (:mod:`hfscale.distributed.files.complete`)
"""

import functools
import logging
import operator
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .._compat.accelerate import stock_optimizer
from .._compat.torch_device import device_module, is_accelerator
from ..distributed.files.directories import target_of
from ..distributed.processes import host_group
from ..errors import CheckpointError, check_count, in_words
from ..train.guards import replicas
from ..train.runtime import Runtime, runtime_of
from ..train.runtime.writing import all_or_none, everyone_arrives, saving
from .state_directory import none_to_resume, run_of
from .state_load import Resumed, load_from
from .state_save import TakenState, contents_of, take_state, write_state

_log = logging.getLogger(__name__)
_ROOM = 1.1  # factor on the needed bytes, for configs, headers, and files of other programs


class _Save(threading.Thread):
    """Save in a thread, which is no daemon, so that the process does not end before the save."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=f"hfscale-save {name}", daemon=False)
        self.target = name
        self.work = work
        self.error: BaseException | None = None

    @saving()
    def run(self) -> None:
        """Save. Keep an error for :func:`wait_for_saves`, and also print it, because nobody may call that function."""
        try:
            self.work()
        except (
            BaseException
        ) as error:  # keep the error, or wait_for_saves would treat the save as complete
            self.error = error
            told = in_words(error)
            print(
                f"hfscale: the asynchronous save of {self.target} failed: {told}",
                file=sys.stderr,
                flush=True,
            )


_running: list[_Save] = []
"""A list of at most one asynchronous save that is running. The save runs in a thread with its own process group, so
that training steps wait only for the copy to CPU memory. The next save and the end of the process wait for it, and
raise its error on every rank.
"""


def wait_for_saves() -> None:
    """Wait until the last ``hfscale.save_state(..., asynchronous=True)`` is on disk; call it on every rank.

    Raises:
        CheckpointError: the save failed; its directory still has the previous content.
    """
    while _running:
        save = _running.pop()
        if save.ident is not None:
            save.join()
        if save.error is not None:
            told = in_words(save.error)
            raise CheckpointError(
                f"the asynchronous save of {save.target} failed: {told}: remove the cause, and save again"
            ) from save.error


def save_runs() -> bool:
    """Return whether an asynchronous save is still being written."""
    return any(save.is_alive() for save in _running)


@functools.lru_cache(maxsize=1)  # cached for the latest process group
def _group(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return host_group([range(dist.get_world_size())])


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to CPU memory, pinned if they come from a GPU; complete on return."""
    copies = {
        key: tensor.to("cpu", non_blocking=True, copy=True) for key, tensor in tensors.items()
    }
    for device in {tensor.device for tensor in tensors.values() if is_accelerator(tensor.device)}:
        device_module(device).current_stream(device).synchronize()
    return copies


@saving()
def save_state(
    model: nn.Module,
    directory: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    step: int | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    timeout: timedelta = timedelta(minutes=2),
    check_replicas: bool = True,
    asynchronous: bool = False,
    **others: Any,
) -> None:
    """Write the state that a run needs to continue, in this or any other layout; call it on every rank, between steps.

    If the process or the machine stops at any moment, a directory is either a complete state or recognizably
    incomplete. Gradients are not saved: call it after the optimizer's step, not between calls that accumulate.

    Args:
        directory: the directory of this state. An earlier state in the same directory is replaced when the new one is
            complete.
        optimizer: an optimizer of parameters of ``model``.
        step: number of completed steps, which :func:`load_state` returns.
        keep_last: in the parent directory, keep only this many states of this run, those of the highest steps, and
            remove its older states.
        keep_every: keep, in addition, states whose step is a multiple of this number.
        check_replicas: compare replicas of parameters bit by bit first.
        asynchronous: return when everything is copied to CPU memory, and write the files during the following steps.
            The next save, :func:`load_state`, :func:`hfscale.wait_for_saves` and the end of the process wait for the
            write, and raise if it failed.
        others: objects with ``state_dict`` and ``load_state_dict`` (``scheduler=...``, ``dataloader=...``), whose
            states are plain data. ``None`` is ignored.

    Raises:
        ConfigError: ``directory``, ``step``, ``keep_last`` or ``keep_every`` is invalid; nothing was written.
        CheckpointError: a rank did not make the call or could not write, replicas differ, or a pipeline schedule
            without a flush has microbatches in flight; ``directory`` is then unchanged.
    """
    runtime, target, call = (
        runtime_of(model),
        target_of(directory),
        f"save_state({str(directory)!r})",
    )
    count = _check_numbers(step, keep_last, keep_every)
    refuse_under_way(runtime, "save_state")
    everyone_arrives(runtime.mesh, timeout, call)
    if check_replicas:
        with all_or_none(runtime.mesh, f"{target} could not be written"):
            wait_for_saves()
            replicas.check_replicas(runtime, call)
    taken = taken_now(runtime, target, optimizer, count, others)
    if asynchronous:
        write_behind(taken, target, lambda: write_state(taken, target, keep_last, keep_every))
    else:
        write_state(taken, target, keep_last, keep_every)


def taken_now(
    runtime: Runtime,
    target: Path,
    optimizer: torch.optim.Optimizer | None,
    step: int | None,
    others: dict[str, Any],
) -> TakenState:
    """Wait for the previous save, and collect what this rank writes of the run's present state; ``target`` is the
    directory of the new state. Collective.
    """
    if not runtime.streams.agreed:
        runtime.streams.synchronize(runtime)
    with all_or_none(runtime.mesh, f"{target} could not be written"):
        wait_for_saves()
        runtime.data.release()  # otherwise, weights that FSDP2 has gathered would be saved as shards
        taken = take_state(runtime, stock_optimizer(optimizer), step, _stateful_objects(others))
        runtime.run = runtime.run or uuid.uuid4().hex
    return taken


def write_behind(taken: TakenState, target: Path, write: Callable[[], None]) -> None:
    """Copy the tensors of a state to CPU memory, then write the state in a thread by calling ``write``; collective.
    ``taken`` is this rank's share of the state, and ``target`` its directory.
    """
    with all_or_none(taken.mesh, f"{target} could not be written"):
        taken.held = on_host(taken.held)
    if taken.mesh.control is not None:  # the thread communicates over a process group of its own
        taken.mesh = replace(taken.mesh, control=_group(dist.group.WORLD))
    save = _Save(str(target), write)
    try:
        save.start()
    except (
        RuntimeError,
        MemoryError,
    ):  # this rank could not start a thread, but the other ranks save
        save.run()
    _running.append(save)


def load_state(
    model: nn.Module,
    directory: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
    missing_ok: bool = False,
    **others: Any,
) -> Resumed:
    """Restore weights, buffers, optimizer, RNG states and ``others`` from a state of :func:`save_state`.

    Call it on every rank, with a model that is built like the saved one, in any layout. In the same layout, the run
    continues bit by bit; in another layout, it continues up to rounding, with other dropout masks.

    Args:
        directory: the directory of a state, or a directory of several states, whose newest complete state is loaded.
        verify: compare every file's checksum first; all ranks together read each file once more.
        missing_ok: return step 0 if the directory is missing or empty, for the first start of a job that restarts
            itself. Still raise if the directory contains other weights.

    Returns:
        the loaded state's directory and ``step``; step 0 if no state was loaded.

    Raises:
        CheckpointError: there is no complete state, or it belongs to another model or optimizer; nothing was changed.
    """
    runtime = runtime_of(model)
    refuse_under_way(runtime, "load_state")
    with all_or_none(runtime.mesh, f"{directory} could not be loaded"):
        wait_for_saves()
        if missing_ok and none_to_resume(Path(directory), runtime.mesh):
            return Resumed(None, 0, runtime.mesh.batch_world, True)
        runtime.data.release()
        resumed = load_from(
            runtime, Path(directory), stock_optimizer(optimizer), _stateful_objects(others), verify
        )
        if resumed.directory is not None:
            runtime.run = run_of(resumed.directory)
        return resumed


def refuse_under_way(runtime: Runtime, call: str) -> None:
    """Raise CheckpointError if a pipeline schedule without flushes has microbatches in flight, whose gradients would be
    lost. ``call`` is the name of the call in the message.
    """
    if runtime.executor.under_way:
        raise CheckpointError(
            f"{call} would lose the gradients of the microbatches that {runtime.mesh.layout.pipeline_schedule} has in "
            "flight: finish these microbatches first (for loss in hfscale.drain(model): optimizer.step())"
        )


def _check_numbers(step: Any, keep_last: object, keep_every: object) -> int | None:
    """Check the numbers and return the step as an int."""
    if hasattr(step, "__index__") and not isinstance(step, bool):
        with suppress(TypeError):
            step = operator.index(step)  # accepts a tensor, for example
    for name, count, least in (
        ("step", step, 0),
        ("keep_last", keep_last, 1),
        ("keep_every", keep_every, 1),
    ):
        if count is not None:
            check_count(name, count, least)
    return step


def _stateful_objects(others: dict[str, Any]) -> dict[str, Any]:
    """Return the objects that have a state; warn of dataloaders without one."""
    by_name = {}
    for name, other in others.items():
        has_state = hasattr(other, "state_dict") and hasattr(other, "load_state_dict")
        # Accelerate's loaders always have these methods, but the methods work only with this attribute.
        if has_state and getattr(other, "use_stateful_dataloader", True):
            by_name[name] = other
        elif isinstance(other, DataLoader):
            _log.warning(
                "%s, a torch.utils.data.DataLoader, has no state_dict, so its position is not saved: after a resume, "
                "skip the batches of the completed steps (accelerate.skip_first_batches), or use torchdata's "
                "StatefulDataLoader",
                name,
            )
        elif other is not None:
            raise CheckpointError(
                f"{name}={type(other).__name__} has no state_dict and load_state_dict, which objects in a state must "
                "have: leave this argument out"
            )
    return by_name


@dataclass(frozen=True)
class SaveCheck:
    """Hold the size of a state that was saved as a test, the free space on its disk, and the times of saving and
    loading it.

    Attributes:
        bytes: size of all ranks' files together.
        free: free bytes on the disk.
        save_seconds: time to save the state.
        load_seconds: time to check and load the state.
    """

    bytes: int
    free: int
    save_seconds: float
    load_seconds: float


def check_save(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, directory: str | Path
) -> SaveCheck:
    """Save a state of the run into ``directory``, load it, and remove it; call it on every rank.

    Call it after the first step, when the optimizer has its state: a run that cannot be saved then fails early, not at
    its first save. The run itself continues unchanged.

    Args:
        directory: where the run's states will be saved.

    Raises:
        CheckpointError: the disk has no room for two states (a new state is complete before the old one is removed), or
            :func:`hfscale.save_state` or :func:`hfscale.load_state` failed.
    """
    runtime = runtime_of(model)
    root = Path(directory)
    with all_or_none(runtime.mesh, f"{root} could not be checked"):
        held = contents_of(runtime, stock_optimizer(optimizer)).held
        needed = sum(
            runtime.mesh.all_gather_object(sum(t.numel() * t.element_size() for t in held.values()))
        )
        free = runtime.mesh.all_gather_object(_room(root, needed) if runtime.mesh.is_first else 0)[
            0
        ]
    target = root / ".check"
    try:
        begun = time.perf_counter()
        save_state(model, target, optimizer=optimizer)
        saved = time.perf_counter()
        load_state(model, target, optimizer=optimizer)
        return SaveCheck(needed, free, saved - begun, time.perf_counter() - saved)
    finally:
        if runtime.mesh.is_first:
            shutil.rmtree(target, ignore_errors=True)


def _room(root: Path, needed: int) -> int:
    """Make the directory ``root`` and return the free bytes of its disk."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < 2 * _ROOM * needed:
        raise CheckpointError(
            f"two states of {needed:,} bytes must fit on the disk, because an old state is deleted only after the new "
            f"one is complete, but {root} has {free:,} bytes free: choose another disk, or free some space"
        )
    return free
