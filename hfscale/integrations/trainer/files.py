"""Checkpoints of a Trainer: plain Hugging Face directories with a training state inside.

::

    checkpoint-N/   config.json, model.safetensors ... (any layout, and stock transformers, reads them)
                    tokenizer, training_args.bin, trainer_state.json: Trainer's own
                    hfscale_state/: weights, optimizer, schedule and RNG states (hfscale.save_state)
                    optimizer.pt, scheduler.pt: for resuming with stock Trainer in one process (:mod:`.stock_state`)

Each is written aside, and appears once complete (:mod:`.output_directories`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..._compat.accelerate import stock_optimizer
from ..._compat.replaced import attribute_replaced
from ..._compat.transformers.trainer import TrainerHooks
from ...checkpoint import load_state, save_pretrained, save_state
from ...checkpoint.weights import load_weights
from ...train.runtime import Runtime, runtime_of
from ...train.runtime.writing import all_or_none, is_writer
from . import stock_state
from .output_directories import ASIDE, STATE, finish_replacing, has_state, make_empty, put_in_place, remove, rotate
from .streams import TrainerRandomStreams


class Checkpoints(TrainerHooks):
    """Hooks that write and read the checkpoints of a Trainer."""

    _streams: TrainerRandomStreams

    @property
    def runtime(self) -> Runtime:
        """The runtime of the model: plan, mesh and parts."""
        trainer: Any = self
        return runtime_of(trainer.model)

    @contextmanager
    def written_aside(self, target: Path) -> Iterator[Path]:
        """Write the checkpoint ``target`` to a temporary directory inside the ``with`` block; rename it once all ranks
        succeed.

        Raises:
            CheckpointError: on every rank, if one of them failed; older checkpoints are then as they were.
        """
        trainer: Any = self
        mesh, aside = self.runtime.mesh, target.parent / ASIDE
        with all_or_none(mesh, f"{target} could not be written"):
            if is_writer(mesh):
                finish_replacing(target.parent)
                make_empty(aside)
        try:
            with all_or_none(mesh, f"{target} could not be written"), _best_named(trainer.state, target):
                yield aside
            with all_or_none(mesh, f"{target} could not be written"):
                if is_writer(mesh):
                    put_in_place(aside / target.name, target)
        finally:
            if is_writer(mesh):
                remove(aside)
        with all_or_none(mesh, f"{target} could not be written"):
            if is_writer(mesh):
                rotate(target, trainer.args.save_total_limit, trainer.state.best_model_checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a plain Hugging Face directory, or an adapter in PEFT's format; call it on every rank."""
        trainer: Any = self
        directory = output_dir or trainer.args.output_dir
        save_pretrained(trainer.model, directory)
        written = attribute_replaced(trainer.model, "save_pretrained", lambda *_, **__: None)
        with all_or_none(self.runtime.mesh, f"{directory} could not be written"), written:
            super().save_model(directory, _internal_call)  # type: ignore[misc]

    def write_state(self, directory: Path) -> None:
        """Write optimizer, schedule and RNG states in hfscale's own format; on every rank."""
        trainer: Any = self
        optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        save_state(trainer.model, directory / STATE, optimizer=optimizer, scheduler=scheduler)
        with all_or_none(self.runtime.mesh, f"{directory} could not be written"):
            stock_state.write(self.runtime, directory, stock_optimizer(optimizer), scheduler)

    def read_state(self, checkpoint: Path) -> None:
        """Read optimizer, schedule and RNG states; without any in the checkpoint, leave them at their beginning, as
        Trainer does.

        Raises:
            CheckpointError: the state belongs to another model, optimizer or, if hfscale wrote it, layout.
        """
        trainer: Any = self
        model, optimizer, scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        if has_state(checkpoint):
            load_state(model, checkpoint / STATE, optimizer=optimizer, scheduler=scheduler)
        elif (checkpoint / stock_state.OPTIMIZER).exists():
            with all_or_none(self.runtime.mesh, f"{checkpoint} could not be loaded"):
                stock_state.read(self.runtime, checkpoint, stock_optimizer(optimizer), scheduler)
        self._streams.read(checkpoint, own=has_state(checkpoint))

    def write_random_states(self, directory: Path) -> None:
        """Write the RNG states that stock Trainer reads, and those at the beginning of the epoch."""
        with all_or_none(self.runtime.mesh, f"{directory} could not be written"):
            self._streams.write(directory)

    def put_back_random_states(self) -> None:
        """Restore the checkpoint's RNG states, once the batches before it are skipped."""
        self._streams.put_back()

    def read_weights(self, checkpoint: Path) -> None:
        """Read the weights of a checkpoint without a training state, which would hold them too."""
        if not has_state(checkpoint):
            self.read_best_weights(checkpoint)

    def read_best_weights(self, checkpoint: Path) -> None:
        """Read the weights from a checkpoint's plain Hugging Face files."""
        model: nn.Module = self.model  # type: ignore[attr-defined]
        load_weights(model, checkpoint)


@contextmanager
def _best_named(state: Any, target: Path) -> Iterator[None]:
    """Record the best checkpoint by its final path, beside ``target``, inside the ``with`` block."""
    save = state.save_to_json

    def name_it() -> None:
        best = target.with_name(f"checkpoint-{state.best_global_step}")
        if state.best_global_step and (best == target or best.is_dir()):
            state.best_model_checkpoint = str(best)

    def save_to_json(path: str) -> None:
        name_it()
        save(path)

    with attribute_replaced(state, "save_to_json", save_to_json):
        yield
    name_it()
