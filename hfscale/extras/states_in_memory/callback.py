"""Save a Trainer's run to its hosts' memory, and resume from this memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..._compat.replaced import attribute_replaced
from ...config.environment import MEMORY
from ...integrations.trainer.resume_callbacks import StatesAside
from ...train.runtime.writing import all_or_none
from .in_memory import StatesInMemory


class StatesInMemoryCallback(StatesAside):
    """Save a Trainer's run to its hosts' memory every ``every`` steps. ``train(resume_from_checkpoint=True)`` resumes
    from memory, or from a newer checkpoint on disk. ``memory`` is a directory on a file system in memory, as for
    :class:`hfscale.StatesInMemory`.
    """

    def __init__(self, every: int, memory: str | Path = MEMORY) -> None:
        self.every = every
        self.memory = memory
        self.due = False
        self.states: StatesInMemory | None = None

    def states_of(self, trainer: Any) -> StatesInMemory:
        """Return the object that saves the trainer's states to memory; the first call makes it, and is collective."""
        if self.states is None:
            output: str = trainer.args.output_dir
            self.states = StatesInMemory(
                trainer.model, output, every=self.every, memory=self.memory
            )
        return self.states

    def newest(self, trainer: Any, found: Path | None) -> Path | None:
        """Return the directory of the state in memory if it is newer than the state ``found`` on disk, else ``None``.
        Call it on every rank.
        """
        return self.states_of(trainer).newest(found)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the Trainer save the state to memory after this step if ``every`` divides the number of steps; after
        other steps, raise if the last save has failed.
        """
        between = state.global_step % self.every
        self.due = not between and state.global_step < state.max_steps
        if between and self.states is not None:
            self.states.save(state.global_step)  # raises if the last save failed

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Skip the save to memory after a save to disk."""
        self.due = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the states from memory after the last step, also after an early stop."""
        self.free()

    def free(self) -> None:
        """Remove the states from memory. Call it on every rank."""
        if self.states is not None:
            self.states.remove()
            self.states = None

    @contextmanager
    def kept(self, trainer: Any) -> Iterator[Path]:
        """Yield a temporary directory, into which the Trainer writes its small files; after the ``with`` block, save
        them to memory together with the state of model, optimizer and schedule.
        """
        states = self.states_of(trainer)
        self.due = False
        states.optimizer = trainer.optimizer
        states.others = {"scheduler": trainer.lr_scheduler}
        with (
            all_or_none(trainer.runtime.mesh, "the state in memory is incomplete"),
            TemporaryDirectory() as aside,
        ):
            with (
                attribute_replaced(
                    trainer, "save_model", lambda directory, **_: Path(directory).mkdir()
                ),
                attribute_replaced(trainer, "write_state", lambda _: None),
            ):
                yield Path(aside)
            written = {path.name: path.read_bytes() for path in Path(aside).glob("*/*")}
        states.save(trainer.state.global_step, written)
