"""Record the actions of a rank while a schedule runs, with their times."""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .timeline import Action


@dataclass
class Record:
    """Hold the recorded actions of one rank as plain data, to send to the rank that builds the timeline."""

    host: str  # name of the machine; ranks on one machine share a clock
    # time on the machine's clock when :meth:`Recorder.start` was called, in nanoseconds
    origin: int
    # actions, each with its start and end in nanoseconds
    events: list[tuple[Action, int, int]] = field(default_factory=list)


class Recorder:
    """Record this rank's actions while a schedule runs; costs about a microsecond per action.

    Call :meth:`start` on every rank right after a barrier: the end of the barrier is taken as the same moment on all
    machines, to align their clocks. Read :attr:`record` after the run. ``wait`` synchronizes with the accelerator and
    is called before each reading of the clock.
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = wait
        self.start()

    def start(self) -> None:
        """Clear the record, and take the current time of this machine's clock as its beginning."""
        self.record = Record(platform.node(), time.perf_counter_ns())

    @contextmanager
    def run(self, action: Action) -> Iterator[None]:
        """Record ``action`` for the duration of the ``with`` block; record nothing if the block raises."""
        begin = self.now()
        yield
        self.note(action, begin)

    def now(self) -> int:
        """Return the time on this machine's clock in nanoseconds, after waiting for launched GPU work."""
        if self._wait is not None:
            self._wait()
        return time.perf_counter_ns()

    def note(self, action: Action, begin: int) -> None:
        """Record that ``action`` ran from ``begin``, a time returned by :meth:`now`, until this call."""
        self.record.events.append((action, begin, self.now()))
