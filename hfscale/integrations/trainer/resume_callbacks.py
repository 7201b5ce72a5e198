"""Restore RNG states when a Trainer's run resumes, and keep its newest state elsewhere than on the disk.

An epoch's order is drawn as the epoch begins; a sampler without a generator (grouping by length, or
``use_seedable_sampler=False``) draws it from the process's RNG. A run that resumes within an epoch needs two states:
the state from which the order was drawn, and, after the trained batches are skipped, the state at the save::

    checkpoint-N/rng_state.pth      {python, numpy, cpu[, cuda]: of the first rank, for stock Trainer in one process,
                                     "began": the same at the beginning of the epoch}
    checkpoint-N/hfscale_state/     every rank's own
"""

import logging
import random
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from ..._compat.torch_device import device_module, is_accelerator
from ..._compat.transformers.trainer import RANDOM, random_states_of_processes, read_random_states
from ...checkpoint.random_states import (
    place_among,
    random_states,
    restore_random_states,
    states_of_process,
)
from ...distributed.mesh import Mesh
from ...train.runtime import Runtime

_log = logging.getLogger(__name__)


class TrainerRandomStreams:
    """Save and restore two RNG states: that of the beginning of the epoch, and that of the save. Checkpoints of stock
    Trainer have only the state of the save.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._began: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = (
            None  # RNG states at the beginning of the checkpoint's epoch
        )
        self._left_off: dict[str, Any] | None = None
        self._goes_on = False

    @property
    def _runtime(self) -> Runtime:
        """Return the runtime of the trainer's model; with ``model_init``, each run has another model."""
        runtime: Runtime = self._trainer.runtime
        return runtime

    @property
    def _mesh(self) -> Mesh:
        return self._runtime.mesh

    def write(self, directory: Path, rows: int) -> None:
        """Write the RNG states into a checkpoint, on its first rank, and the number of ``rows`` in a step."""
        if self._mesh.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            torch.save(
                {**_stock_random_states(self._mesh), "began": self._began, "rows": rows},
                directory / RANDOM,
            )

    def read(self, checkpoint: Path, own: bool, rows: int) -> None:
        """Read a checkpoint's RNG states. ``own`` is whether the checkpoint contained the states of this very rank,
        which :func:`hfscale.load_state` has then restored already. Warn if the steps of the earlier run had another
        number of rows than ``rows``.
        """
        mesh = self._mesh
        processes = random_states_of_processes(checkpoint)
        of_batches = processes > 0 and processes == mesh.batch_world
        states = read_random_states(checkpoint, mesh.batch_rank if of_batches else None)
        if processes and states is None and not own and mesh.is_first:
            _log.warning(
                "%s has RNG states of %d processes, but this layout has %d distinct batches, so the states are not "
                "restored, and dropout masks will differ from those of the earlier run: to restore them, resume in a "
                "layout with as many distinct batches as there are states",
                checkpoint,
                processes,
                mesh.batch_world,
            )
        self._goes_on = True
        self._before = None
        self._left_off = None
        if own:
            self._left_off = random_states(mesh)
        elif states is not None:
            now = random_states(mesh)
            restore_random_states(mesh, _read(states), place_among(mesh, of_batches))
            self._left_off = random_states(mesh)
            restore_random_states(mesh, now)
        if states is not None and states.get("began") is not None:
            self._before = _read(states["began"])
        if states is not None and (then := states.get("rows", rows)) != rows and mesh.is_first:
            warnings.warn(
                f"{checkpoint} was written by steps of {then} rows over all ranks, but steps now have {rows} rows, so "
                "the run repeats or leaves out rows of an epoch: change per_device_train_batch_size or "
                "gradient_accumulation_steps to restore the earlier number of rows",
                stacklevel=2,
            )

    def put_back(self) -> None:
        """Restore the checkpoint's RNG states."""
        if self._left_off is None:
            return
        restore_random_states(self._mesh, self._left_off)
        # Otherwise the first step would reseed all batches' streams except the first's.
        self._runtime.streams.agreed = True

    def follow(self, handler: CallbackHandler) -> None:
        """Run this object's hook at the beginning of each epoch, after all callbacks, without appearing in the user's
        list of callbacks.
        """
        call_callbacks = handler.on_epoch_begin

        def on_epoch_begin(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control = call_callbacks(args, state, control, **kwargs)
            self._begin_epoch(args, state)
            return control

        handler.on_epoch_begin = on_epoch_begin  # type: ignore[method-assign]

    def _begin_epoch(self, args: Any, state: Any) -> None:
        """Restore the RNG states from which a resumed run draws the epoch's order, and record the present states."""
        within = state.epoch is not None and state.epoch % 1 != 0 and not args.ignore_data_skip
        states = self._before if within else self._left_off
        if self._goes_on and states is not None:
            restore_random_states(self._mesh, states)
        self._goes_on = False
        self._began = _stock_random_states(None)


def _stock_random_states(mesh: Mesh | None) -> dict[str, Any]:
    """Return this process's RNG states in the format of stock Trainer's ``rng_state.pth``; without ``mesh``, those of
    the CPU alone.
    """
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    states["cpu"] = torch.random.get_rng_state()
    if mesh is not None and is_accelerator(mesh.device):
        states["cuda"] = device_module(mesh.device).get_rng_state()
    return states


def _read(written: dict[str, Any]) -> dict[str, Any]:
    """Convert RNG states from the format of stock Trainer's ``rng_state.pth`` to the one that
    :func:`restore_random_states` reads.
    """
    device = written.get("cuda")
    given = device if isinstance(device, torch.Tensor) else None
    return states_of_process(written["python"], written["numpy"], written["cpu"], given)


class StatesAside(TrainerCallback):
    """Keep a Trainer's newest state elsewhere than in its output directory, between its checkpoints."""

    due = False
    """Whether the state after the present step must be kept."""

    def kept(self, trainer: Any) -> AbstractContextManager[Path]:
        """Return a context that yields a directory, to which Trainer writes its small files (``trainer_state.json``,
        for example). At its end, these files are saved together with the run's state.
        """
        raise NotImplementedError

    def newest(self, trainer: Any, found: Path | None) -> Path | None:
        """Return a kept state that is newer than ``found``, the checkpoint on the disk, or ``None``; collective."""
        raise NotImplementedError

    def free(self) -> None:
        """Remove the kept state at the end of a run; collective."""
