"""Keep a Trainer's newest checkpoint in memory: a state of :class:`hfscale.StatesInMemory` with Trainer's own files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TrainerCallback

from ..._compat.replaced import attribute_replaced
from ...checkpoint.in_memory import StatesInMemory
from ...config.environment import MEMORY


class StatesInMemoryCallback(TrainerCallback):
    """Save a Trainer's run to its hosts' memory every few steps: ``train(resume_from_checkpoint=True)`` goes on from
    there, or from a newer checkpoint on disk. ``every`` and ``memory``: as for :class:`hfscale.StatesInMemory`.
    """

    def __init__(self, every: int, memory: str | Path = MEMORY) -> None:
        self.every, self.memory, self.due = every, memory, False
        self.states: StatesInMemory | None = None

    def states_of(self, trainer: Any) -> StatesInMemory:
        """Return the states of a trainer; collective the first time."""
        if self.states is None:
            output: str = trainer.args.output_dir
            self.states = StatesInMemory(trainer.model, output, every=self.every, memory=self.memory)
        return self.states

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for a save to memory, where none to disk is due, or may be."""
        asked = control.should_save or (args.save_strategy == "best" and control.should_evaluate)
        self.due = not asked and state.global_step % self.every == 0 and state.global_step < state.max_steps
        control.should_save = control.should_save or self.due

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Free the memory after the last step."""
        if self.states is not None and state.global_step >= state.max_steps:
            self.states.remove()
            self.states = None

    @contextmanager
    def kept(self, trainer: Any) -> Iterator[Path]:
        """Let Trainer write its small files to a directory; save them with the run's state behind the block."""
        states = self.states_of(trainer)
        states.optimizer, states.others = trainer.optimizer, {"scheduler": trainer.lr_scheduler}
        with TemporaryDirectory() as aside:
            with (
                attribute_replaced(trainer, "save_model", lambda directory, **_: Path(directory).mkdir()),
                attribute_replaced(trainer, "write_state", lambda _: None),
            ):
                yield Path(aside)
            written = {path.name: path.read_bytes() for path in Path(aside).glob("*/*")}
        states.save(trainer.state.global_step, written)
