"""Find a slow rank: measure how long each rank works in a step, and how long it waits for other ranks.

All ranks end a step together, so the duration of a step does not show which rank is slow. The times at which ranks
enter a collective do show it: a rank waits in a collective until the last rank enters it, and the rest of the step is
the rank's own work. Torch's flight recorder records these times (for sends and receives of pipelines:
:func:`..distributed.ops.collectives.waiting`). At the end of a window of steps, ranks exchange them. Medians over steps
are compared, so that no rank is named because of one long step (a save, a breakpoint). On GPUs, these are times of the
CPU, so a rank on which only the GPU is slow is not found.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from statistics import median
from typing import Any

from .._compat.torch_gloo import Call, recorded_calls
from ..distributed.ops.collectives import past_waits
from .runtime import Part, Runtime
from .runtime.batches import Microbatch

_log = logging.getLogger(__name__)
# number of steps in the first window, and the bounds for any later window
_FIRST = 12
_LEAST = 20
_MOST = 10_000
# Number of steps at the end of a window that are compared; torch's recorder keeps 2,000 collectives.
_COMPARED = 200
_SECONDS = 60.0  # duration of a window, within these bounds
# a rank is named if its work exceeds this multiple of the median, and others wait for it longer than this fraction
# of a step
_SLOW = 1.3
_SHARE = 0.05
_CALLS = 64_000  # maximum number of times that are exchanged, over all ranks

Span = tuple[float, float]
# One rank's times, in seconds before the end of a window: starts of its steps, its collectives, its receives.
Told = tuple[list[float], list[Call], list[Span]]


class StepTimes(Part):
    """Measure how long each rank works in training steps, and compare the ranks at the end of each window of steps."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._length = _FIRST
        self._found: dict[str, float] = {}

    def is_needed(self, runtime: Runtime) -> bool:
        """Return whether there are several ranks to compare."""
        return not runtime.is_alone

    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> AbstractContextManager[None]:
        """Record the start of a training step; at the end of a window of steps, compare ranks."""
        if train:
            self._starts.append(time.time())
        if len(self._starts) > self._length:
            self._compare(runtime)
        return nullcontext()

    def metrics(self, runtime: Runtime) -> Mapping[str, float]:
        """Return ``step_seconds``, the duration of a step, and ``work_seconds/rank_N``, the time that rank N has worked
        in it: medians over the last window of steps.
        """
        return self._found

    def _compare(self, runtime: Runtime) -> None:
        mesh = runtime.mesh
        starts = self._starts[-_COMPARED:]
        mesh.largest(
            0
        )  # a barrier that ends at the same moment on all ranks, because clocks of machines differ
        now = time.time()
        most = _CALLS // mesh.layout.total_size
        calls = [(key, at - now) for key, at in recorded_calls() if starts[0] <= at <= starts[-1]][
            -most:
        ]
        waits = [(begin - now, end - now) for begin, end in past_waits() if begin >= starts[0]]
        step, works = compared(
            mesh.all_gather_object(([start - now for start in starts], calls, waits))
        )
        # if nothing was recorded
        self._starts = starts[-1:]
        self._length = _MOST
        if works:
            self._found = {
                "step_seconds": step,
                **{f"work_seconds/rank_{rank}": own for rank, own in enumerate(works)},
            }
            self._length = int(min(max(_SECONDS / step, _LEAST), _MOST))
            if mesh.rank == 0 and (words := in_a_line(step, works)):
                _log.warning(words)


def compared(every: Sequence[Told]) -> tuple[float, list[float]]:
    """Return the median duration of a step, and the median time that each rank has worked in a step, in seconds.
    ``every`` holds the times that each rank has recorded; if there are none, the result is ``(0.0, [])``.
    """
    last: dict[Any, float] = {}
    for _, calls, _ in every:
        for key, at in calls:
            last[key] = max(at, last.get(key, at))
    count = min(len(starts) for starts, *_ in every)
    begin = max(min((at for _, at in calls), default=0.0) for _, calls, _ in every)
    seconds = list[float]()
    works = list[float]()
    for starts, calls, receives in every:
        spans = [*((at, last[key]) for key, at in calls), *receives]
        edges = [start for start in starts[-count:] if start >= begin]
        if len(edges) < 2 or not spans:
            return 0.0, []
        seconds.append(median(b - a for a, b in pairwise(edges)))
        works.append(median(b - a for a, b in pairwise(worked(spans, edges))))
    return median(seconds), works


def worked(waits: Iterable[Span], times: Sequence[float]) -> list[float]:
    """Return, for each of the moments ``times``, how many seconds a rank has worked since the first of them: the
    elapsed time without the intervals ``waits`` in which it waited, which may overlap.
    """
    changes = [change for begin, end in waits for change in ((begin, 1), (end, -1))]
    seconds = list[float]()
    total = 0.0
    waiting = 0
    last = times[0]
    for at, change in sorted(
        [
            *changes,
            *((at, 0) for at in times),
        ]
    ):
        if not waiting and at > times[0]:
            total += at - last
        waiting = waiting + change
        last = at
        if not change:
            seconds.append(total)
    return seconds


def in_a_line(step: float, works: Sequence[float]) -> str:
    """Return a warning that names the slow rank; empty if no rank is slow. ``step`` is the duration of a step, and
    ``works`` the time that each rank has worked in it, in seconds.
    """
    slow = works.index(max(works))
    others = median([*works[:slow], *works[slow + 1 :]])
    waited = works[slow] - others
    if works[slow] < _SLOW * others or waited < _SHARE * step:
        return ""
    return (
        f"rank {slow} works {works[slow]:.3g} s on a step, {works[slow] / max(others, 1e-9):.1f}x the median of the "
        f"others, who wait {waited:.2g} s of {step:.3g} s for it"
    )
