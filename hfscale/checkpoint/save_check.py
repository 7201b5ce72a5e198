"""Check at the first step, rather than at the first save, that a run can be saved and resumed."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .._compat.accelerate import stock_optimizer
from ..errors import CheckpointError
from ..train.runtime import runtime_of
from ..train.runtime.writing import all_or_none, is_writer
from .state import load_state, save_state
from .state_save import contents_of

_ROOM = 1.1  # factor on the bytes needed: configs, headers, and others' files


@dataclass(frozen=True)
class SaveCheck:
    """Size and duration of a saved state of a run.

    Attributes:
        bytes: of all ranks' files.
        free: bytes on the disk.
        save_seconds: for saving it.
        load_seconds: for checking and loading it.
    """

    bytes: int
    free: int
    save_seconds: float
    load_seconds: float


def check_save(model: nn.Module, optimizer: torch.optim.Optimizer | None, directory: str | Path) -> SaveCheck:
    """Save a state of the run into ``directory``, load it, and remove it; call it on every rank.

    Call it after the first step, when the optimizer has its state. The run continues unchanged.

    Args:
        directory: where the run's states will be saved.

    Raises:
        CheckpointError: there is no room for two states (the next one is written beside the last), or an error of
            :func:`hfscale.save_state` or :func:`hfscale.load_state`.
    """
    runtime, root = runtime_of(model), Path(directory)
    with all_or_none(runtime.mesh, f"{root} could not be checked"):
        held = contents_of(runtime, stock_optimizer(optimizer)).held
        needed = sum(runtime.mesh.all_gather_object(sum(t.numel() * t.element_size() for t in held.values())))
        free = runtime.mesh.all_gather_object(_room(root, needed) if is_writer(runtime.mesh) else 0)[0]
    target = root / ".check"
    try:
        begun = time.perf_counter()
        save_state(model, target, optimizer=optimizer)
        saved = time.perf_counter()
        load_state(model, target, optimizer=optimizer)
        return SaveCheck(needed, free, saved - begun, time.perf_counter() - saved)
    finally:
        if is_writer(runtime.mesh):
            shutil.rmtree(target, ignore_errors=True)


def _room(root: Path, needed: int) -> int:
    """Make the directory ``root`` and return the free bytes of its disk."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < 2 * _ROOM * needed:
        raise CheckpointError(
            f"two states of {needed:,} bytes must fit on the disk while one replaces the other, and {root} has "
            f"{free:,} bytes free: choose another disk, or make room"
        )
    return free
