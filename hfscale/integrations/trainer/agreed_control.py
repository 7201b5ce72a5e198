"""Let all ranks of a run stop, save, evaluate and log together if a callback asks for it on some of them.

A callback that looks at a clock, or that a script gives to one rank alone, sets ``control.should_training_stop`` on
some ranks, or on all of them in different steps. These ranks would leave the loop, and the others would wait for them
forever. So after the events in which Trainer reads its control, a request of any rank becomes a request of all ranks::

    rank 0    step 7: its time is over    --> should_training_stop
    rank 1    step 7                      --> should_training_stop, because rank 0 asks for it

transformers' own callbacks decide by numbers that all ranks have. If a run has no others, nothing is exchanged.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import CallbackHandler

_REQUESTS = tuple(sorted(vars(TrainerControl())))
_HOSTS = ("transformers.", "trl.", "hfscale.")
_EVENTS = ("on_step_end", "on_epoch_end")
_REPORTS = ("on_log", "on_evaluate")
_WITHIN_STEPS = "on_substep_end"


class AgreedControl:
    """Make the requests of callbacks in ``trainer.control`` equal on all ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._events = frozenset[str]()  # after which ranks agree in this run
        self._in_reports = False
        self._in_callbacks = False

    def follow(self, handler: CallbackHandler) -> None:
        """Agree after the callbacks of each event in which Trainer reads requests."""
        begin = handler.on_train_begin

        def on_train_begin(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            made = begin(args, state, control, **kwargs)
            self._choose_events(handler)
            return made

        handler.on_train_begin = on_train_begin  # type: ignore[method-assign]
        for event in (*_EVENTS, *_REPORTS, _WITHIN_STEPS):
            setattr(handler, event, self._agreeing(getattr(handler, event), event))

    @contextmanager
    def while_reported(self) -> Iterator[None]:
        """Enter while Trainer logs, evaluates and saves after a step, on every rank."""
        self._in_reports = True
        try:
            yield
        finally:
            self._in_reports = False
        self._agree(_EVENTS[0])

    def _agree(self, event: str) -> None:
        if event not in self._events:
            return
        control = self._trainer.control
        asked = [int(getattr(control, name)) for name in _REQUESTS]
        for name, told in zip(_REQUESTS, self._trainer.runtime.mesh.largest(*asked), strict=True):
            setattr(control, name, bool(told))

    def _choose_events(self, handler: CallbackHandler) -> None:
        kinds = [type(each) for each in handler.callbacks]
        own = [kind for kind in kinds if not kind.__module__.startswith(_HOSTS)]
        within = any(kind.on_substep_end is not TrainerCallback.on_substep_end for kind in own)
        some, some_within = self._trainer.runtime.mesh.largest(int(bool(own)), int(within))
        chosen = [*_EVENTS, *_REPORTS] if some else []
        self._events = frozenset([*chosen, _WITHIN_STEPS] if some_within else chosen)

    def _agreeing(self, call: Callable[..., Any], event: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            nested = self._in_callbacks
            self._in_callbacks = True
            try:
                self._trainer.control = call(*args, **kwargs)
            finally:
                self._in_callbacks = nested
            # A script may log or evaluate at other times, and log on one rank alone.
            if not nested and (self._in_reports or event not in _REPORTS):
                self._agree(event)
            return self._trainer.control

        return called
