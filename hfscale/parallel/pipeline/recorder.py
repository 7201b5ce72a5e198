"""Note what a rank does while a schedule runs, and when."""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .timeline import Action


@dataclass
class Record:
    """Hold the recorded actions of one rank, as plain data to send to the rank that builds the timeline."""

    host: str  # name of the machine; ranks of one machine share a clock
    origin: int  # nanoseconds of that clock when :meth:`Recorder.start` was called
    # actions, each with its first and last nanosecond
    events: list[tuple[Action, int, int]] = field(default_factory=list)


class Recorder:
    """Record what this rank does while a schedule runs; about a microsecond per action.

    Call :meth:`start` on every rank right after a barrier, where clocks of different machines are aligned, and read
    :attr:`record` afterwards. Before the clock is read, ``wait`` synchronizes with the accelerator.
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = wait
        self.start()

    def start(self) -> None:
        """Clear the record and set the clock."""
        self.record = Record(platform.node(), time.perf_counter_ns())

    @contextmanager
    def run(self, action: Action) -> Iterator[None]:
        """Record ``action`` over the with block; nothing is recorded if the block raises."""
        begin = self.now()
        yield
        self.note(action, begin)

    def now(self) -> int:
        """Return nanoseconds on this machine's clock, after waiting for launched work."""
        if self._wait is not None:
            self._wait()
        return time.perf_counter_ns()

    def note(self, action: Action, begin: int) -> None:
        """Record ``action`` from ``begin``, a time returned by :meth:`now`, to now."""
        self.record.events.append((action, begin, self.now()))
