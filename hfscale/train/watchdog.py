"""Report ranks that wait forever: which rank waits for which other ranks, in which collective and over which mesh axis.

On every rank, a thread periodically finds the call in which the rank waits, from torch's flight recorder and
:mod:`..distributed.ops.collectives`, and writes it to the rendezvous store as the rank's state. If a wait takes too
long, the first waiting rank reads the states of all ranks twice: a rank whose state did not change in between is dead.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch import nn

from .._compat.torch_gloo import (
    collectives_under_way,
    frames_of_main_thread,
    own_store,
    ranks_of_group,
)
from ..config.parallel import AXES
from ..distributed.failures import CODE, is_wanted
from ..distributed.mesh import EXPERT_AXES, Mesh
from ..distributed.ops.collectives import waits
from ..distributed.user_code import innermost_lines
from ..errors import check_number, check_switch
from .runtime import runtime_of

PATIENCE = 300.0
_running: "list[_Watchdog]" = []
_HEAD = "[hfscale watchdog] ranks have waited for more than {:g} s"


def watchdog(
    model: nn.Module,
    *,
    patience: float = PATIENCE,
    end: bool = False,
) -> None:
    """Report on stderr which ranks wait for which others, in which call and over which axis, if a wait takes too long.

    The watchdog complements torch's own timeouts, which end a collective after minutes without naming the missing rank.
    If a launcher started the ranks, a watchdog that only reports runs by default, unless ``HFSCALE_FAILURES=0``. Call
    this function once on every rank, before the first step, to set another patience, or to end the waiting ranks.

    Args:
        patience: seconds that a collective or a pipeline stage may wait. Work of a single rank (such as the first rank
            writing a checkpoint) must not take longer.
        end: whether to end the waiting processes, with exit code 75, so that a launcher with ``--max_restarts``
            restarts the job.

    Raises:
        ConfigError: ``patience`` is not a positive number.
    """
    check_number("patience", patience, above=0)
    check_switch("end", end)
    mesh = runtime_of(model).mesh
    while _running:
        _running.pop().stop()
    if mesh.control is not None:
        _running.append(_Watchdog(mesh, patience, end))


def watch_by_default(mesh: Mesh) -> None:
    """Start a watchdog that reports long waits but ends no process, if a launcher started the ranks and no watchdog
    runs yet.
    """
    if mesh.control is not None and not _running and is_wanted():
        _running.append(_Watchdog(mesh, PATIENCE, end=False))


@dataclass(frozen=True)
class RankState:
    """Hold what one rank writes to the rendezvous store: the call in which it waits, how long, and at which line of
    code.
    """

    beat: int  # number of entries that the rank has written
    seconds: float = 0.0  # how long the rank has waited
    # A text with the call and the group in which the rank waits; empty if the rank waits for no other rank.
    waits: str = ""
    place: str = ""  # the innermost line of the user's code
    inside: str = ""  # the innermost line of hfscale's code, if this code runs


class _Watchdog(threading.Thread):
    """Watch this rank in a daemon thread: write its state to the rendezvous store, and report waits that take too long.
    The thread is stopped before the interpreter exits.
    """

    def __init__(self, mesh: Mesh, patience: float, end: bool) -> None:
        super().__init__(name="hfscale-watchdog", daemon=True)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.patience = patience
        self.end = end
        self.pause = min(max(patience / 8, 0.1), 30.0)
        self.store = own_store(
            f"hfscale-watchdog-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        )
        self.names = _group_names(mesh)
        self._beat = 0
        self._reported = 0.0
        self._ended = threading.Event()
        atexit.register(self.stop)
        self.start()

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self._ended.set()
        if threading.current_thread() is not self:
            self.join(10)

    def run(self) -> None:
        """Write this rank's state to the rendezvous store and check for a long wait, again and again until the process
        ends.
        """
        while not self._ended.wait(self.pause):
            seen = self._look()
            if seen.seconds < self._reported:
                self._reported = 0.0  # a new wait
            late = seen.seconds >= max(self.patience, 2 * self._reported)
            try:
                self._tell(seen)
                if late and not self._report():
                    continue
            except (
                RuntimeError
            ) as error:  # from the store, which may end before this process without an error
                if late:
                    _say(
                        f"{_HEAD.format(self.patience)}. The rendezvous store cannot be reached: {error}"
                    )
                    _say("\n".join(_lines({self.rank: _in_words(seen)})))
            if late:
                self._reported = seen.seconds
                if self.end:
                    self._ended.wait(
                        self.pause
                    )  # wait until the other ranks have read this rank's state
                    os._exit(CODE)

    def _look(self) -> RankState:
        self._beat += 1
        lines = innermost_lines((frame, frame.f_lineno) for frame in frames_of_main_thread())
        return RankState(self._beat, *self._waits(), *lines)

    def _tell(self, seen: RankState) -> None:
        self.store.set(str(self.rank), json.dumps(asdict(seen)))

    def _waits(self) -> tuple[float, str]:
        for one in waits():
            name = getattr(one.group, "group_name", "")
            direction = "from" if one.call == "recv" else "to"
            return (
                time.monotonic() - one.since,
                f"{one.call} {direction} rank {one.peer} over {self._named(name)}",
            )
        saving = (t.ident or 0 for t in threading.enumerate() if t.name.startswith("hfscale-save"))
        for entry in collectives_under_way(leave_out=saving):
            shapes = f" of {entry.shapes}" if entry.shapes else ""
            return (
                time.time_ns() - entry.created
            ) / 1e9, f"{entry.call}{shapes} over {self._named(entry.group)}"
        return 0.0, ""

    def _named(self, group: str) -> str:
        ranks_in_group = ranks_of_group(group)
        ranks = (
            "all ranks"
            if len(ranks_in_group) == self.world
            else f"ranks {', '.join(map(str, ranks_in_group))}"
        )
        return (
            f"{self.names.get(group, f'group {group}')} ({ranks})"
            if ranks_in_group
            else f"group {group}"
        )

    def _report(self) -> bool:
        """Print the report about all ranks if this is the first of the waiting ranks. Return whether this rank still
        waits.
        """
        before = self._heard()
        if self._ended.wait(3 * self.pause):
            return False
        seen = self._look()
        self._tell(seen)
        after = self._heard()
        if seen.seconds < self.patience:
            return False
        silent = {
            r
            for r, (old, new) in enumerate(zip(before, after, strict=True))
            if new is None or new == old
        }
        waiting = [
            r for r, s in enumerate(after) if s and r not in silent and s.seconds >= self.patience
        ]
        if waiting and waiting[0] == self.rank:
            _say(report(after, silent, self.patience))
        return True

    def _heard(self) -> list[RankState | None]:
        keys = [str(rank) for rank in range(self.world)]
        return [
            RankState(**json.loads(self.store.get(key))) if self.store.check([key]) else None
            for key in keys
        ]


def _group_names(mesh: Mesh) -> dict[str, str]:
    """Map torch's name of each process group (a number) to a text that names the group's mesh axis. If several axes
    have the same group, the text names the first of them.
    """
    named: list[tuple[dist.ProcessGroup | None, str]]
    named = [(mesh.group(axis), axis) for axis in dict.fromkeys((*reversed(AXES), *EXPERT_AXES))]
    named.append((mesh.whole_sequences, "dp_shard"))
    named += [
        (group, f"tp, {count} ranks with the same values") for count, group in mesh.replicas.items()
    ]
    named += [(group, f"pp, {here} to {there}") for (here, there), group in mesh.streams.items()]
    for members, group in (*mesh.ties.items(), *mesh.tie_reports.items()):
        named.append((group, f"pp, {' and '.join(map(str, members))}, which hold one tensor"))
    named += [
        (mesh.reports, "pp"),
        (mesh.expert_reports, "ep"),
        (mesh.sharing, "the ranks of one batch"),
    ]
    named += [(mesh.control, "the hosts"), (dist.group.WORLD, "torch's process group")]
    names: dict[str, str] = {}
    for made, words in named:
        if made is not None:
            names.setdefault(made.group_name, words)
    return names


def report(
    every: Sequence[RankState | None],
    silent: set[int],
    patience: float,
) -> str:
    """Return the report about all ranks: a line for each state, with the ranks that are in it. Ranks in ``silent`` have
    not updated their state, and are reported as dead.
    """
    texts = {rank: _in_words(seen, silent=rank in silent) for rank, seen in enumerate(every)}
    return "\n".join(
        [f"{_HEAD.format(patience)}. Look at the ranks that do not wait", *_lines(texts)]
    )


def _in_words(seen: RankState | None, silent: bool = False) -> str:
    at = "" if seen is None else ", in ".join(filter(None, (seen.place, seen.inside)))
    if seen is None or silent:
        text = "gives no sign of life: the process or its machine is gone, or it is stuck outside of Python"
        return text + (f"; it was last at {at}" if at else "")
    if seen.waits:
        return f"waits in {seen.waits}, for {seen.seconds:.0f} s, at {at}"
    return f"waits for no other rank, and is at {at}"


def _lines(texts: dict[int, str]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return [
        f"  rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}: {text}"
        for text, of in ranks.items()
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
