"""What a recipe says of stopping and going on, between the steps of its training loop."""

from types import TracebackType
from typing import Any

import hfscale

from ..train.preemption import stop_listening
from .run_log import RunLog
from .schema import Recipe


class Saves:
    """The saved state of a run; within, signals that announce the end are listened to.

    Args:
        progress: has a state, and a context ``aside`` for what is no training.
        others: what else goes into the state.
    """

    def __init__(self, model: Any, recipe: Recipe, log: RunLog, progress: Any, **others: Any) -> None:
        self._model, self._recipe, self._log = model, recipe, log
        self._progress, self._others = progress, {**others, "progress": progress}
        self._check = recipe.save_check

    def __enter__(self) -> "Saves":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        stop_listening()

    def resume(self) -> bool:
        """Go on from what was saved; whether there is anything."""
        state = self._recipe.saved_state
        if state is not None:
            hfscale.load_state(self._model, state, **self._others)
            self._log.go_on(self._progress.step)
        return state is not None

    def before_step(self) -> None:
        """End the process, once all is saved, where one was told to stop."""
        if self._recipe.training.save_every and hfscale.preempted(self._model):
            self._save()
            raise hfscale.Preempted

    def after_step(self) -> None:
        """Save, where it is time; and behind the first step try it out."""
        every = self._recipe.training.save_every
        if every and self._progress.step % every == 0:
            self._save()
        if self._check:
            self._check = False
            with self._progress.aside():
                optimizer = self._others["optimizer"]
                self._log.checked(hfscale.check_save(self._model, optimizer, self._recipe.directory))

    def _save(self) -> None:
        with self._progress.aside():
            hfscale.save_state(self._model, self._recipe.directory / "state", **self._others)
