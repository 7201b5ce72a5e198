"""Checkpoints of a Trainer: plain Hugging Face directories, and the state of a run inside them.

::

    checkpoint-N/   config.json, model.safetensors ... (any layout, and stock transformers, reads them)
                    tokenizer, training_args.bin, trainer_state.json: Trainer's own
                    hfscale_state/: weights, optimizer, schedule and random streams (hfscale.save_state)
                    optimizer.pt, scheduler.pt: what stock Trainer in one process resumes from (:mod:`.stock_state`)

Each is written aside, and appears whole (:mod:`.directories`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from .._host.accelerate import stock_optimizer
from .._host.replaced import attribute_replaced
from .._host.transformers.trainer import TrainerHooks
from ..checkpoint import load_state, save_pretrained, save_state
from ..checkpoint.weights import load_weights
from ..runtime import Runtime, runtime_of
from ..runtime.writing import all_or_none, is_writer
from . import stock_state
from .directories import ASIDE, STATE, finish_replacing, has_state, make_empty, put_in_place, remove, rotate
from .streams import RandomStreams


class Checkpoints(TrainerHooks):
    """Writes and reads the checkpoints of a Trainer."""

    _streams: RandomStreams

    @property
    def runtime(self) -> Runtime:
        """Plan, ranks and parts of the model."""
        trainer: Any = self
        return runtime_of(trainer.model)

    @contextmanager
    def written_aside(self, target: Path) -> Iterator[Path]:
        """Let the checkpoint ``target`` be written aside, and appear once it is whole on every rank.

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
        """Write optimizer, schedule and random streams in hfscale's own format; on every rank."""
        trainer: Any = self
        optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        save_state(trainer.model, directory / STATE, optimizer=optimizer, scheduler=scheduler)
        with all_or_none(self.runtime.mesh, f"{directory} could not be written"):
            stock_state.write(self.runtime, directory, stock_optimizer(optimizer), scheduler)

    def read_state(self, checkpoint: Path) -> None:
        """Read them; a checkpoint without a state leaves everything at its beginning, as Trainer does.

        Raises:
            CheckpointError: the state is of another model, optimizer or, where hfscale wrote it, layout.
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
        """Write the random streams that stock Trainer reads, and those at the beginning of the epoch."""
        with all_or_none(self.runtime.mesh, f"{directory} could not be written"):
            self._streams.write(directory)

    def put_back_random_states(self) -> None:
        """Go on with the checkpoint's random streams, once the batches before it are skipped."""
        self._streams.put_back()

    def read_weights(self, checkpoint: Path) -> None:
        """Read the weights of a checkpoint without a state, which would hold them too."""
        if not has_state(checkpoint):
            self.read_best_weights(checkpoint)

    def read_best_weights(self, checkpoint: Path) -> None:
        """Read the weights of the plain directory that every checkpoint is."""
        model: nn.Module = self.model  # type: ignore[attr-defined]
        load_weights(model, checkpoint)


@contextmanager
def _best_named(state: Any, target: Path) -> Iterator[None]:
    """Within: the best checkpoint is written down under the name that it has, or will have, beside ``target``."""
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
