"""Simulate an order with its transfers, where a communicator carries one transfer at a time.

:func:`hfscale.parallel.pipeline.simulation.simulate` lets all transfers run at once. On NCCL both ranks of a transfer
enqueue it; it begins when both have reached it, and blocks what they enqueue on the same communicator after it::

    computing, per rank       F0 F1 F2 B0 ...            waits for what it needs to arrive, not for what it sends
    a communicator, per rank  recv -> recv -> send ...   each begins with its other half, on the other rank

So a receive that is enqueued early, from a rank that will send late, blocks a communicator that it shares with others.
Here ranks enqueue transfers where their programs do (:mod:`hfscale.parallel.pipeline.transfers`), and wait for them
where :class:`~hfscale.parallel.pipeline.worker.StageWorker` does.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from hfscale.errors import ConfigError
from hfscale.parallel.pipeline.simulation import DEFAULT_COSTS, Costs
from hfscale.parallel.pipeline.timeline import Action, Order, Span, Timeline, stage_ranks
from hfscale.parallel.pipeline.transfers import rank_programs

_Programs = list[list[tuple[str, int, int]]]


@dataclass(eq=False)
class _Task:
    """An entry of a rank's queue: an action, a wait (which takes no time), or one half of a transfer."""

    duration: float
    needs: list["_Task"]
    action: Action | None = None
    other: "_Task | None" = None  # of a transfer, the half on the other rank
    start: float = 0.0
    end: float | None = None


@dataclass
class _Rank:
    """Build the queue of one rank from its program."""

    rank: int
    homes: dict[int, int]
    costs: Costs
    queues: dict[Hashable, list[_Task]]
    halves: dict[tuple[str, int, int], list[_Task]]  # transfer -> its halves, of all ranks
    trains: bool
    arriving: dict[tuple[str, int, int], _Task] = field(default_factory=dict)
    leaving: dict[tuple[int, int], _Task] = field(default_factory=dict)
    sent: list[_Task] = field(default_factory=list)

    def run(self, program: list[tuple[str, int, int]]) -> None:
        """Queue all transfers and computations of the rank's program, in order."""
        for kind, stage, index in program:
            if kind == "RECV_F":
                self.arriving["forward", stage, index] = self._transfer(
                    kind, stage - 1, (kind[-1], stage, index)
                )
            elif kind == "RECV_B":
                self.arriving["backward", stage, index] = self._transfer(
                    kind, stage + 1, (kind[-1], stage, index)
                )
            elif kind == "SEND_F":
                if not self.trains:  # no returning gradient will show which sends have arrived
                    for old in list(self.leaving)[:-1]:
                        self._compute(0.0, [self.leaving.pop(old)])
                self.leaving[stage, index] = self._transfer(
                    kind, stage + 1, (kind[-1], stage + 1, index)
                )
            elif kind == "SEND_B":
                while len(self.sent) > 1:
                    self._compute(0.0, [self.sent.pop(0)])
                self.sent.append(self._transfer(kind, stage - 1, (kind[-1], stage - 1, index)))
            else:
                self._action(Action(stage, kind, index))  # type: ignore[arg-type]
        self._compute(0.0, [*self.leaving.values(), *self.sent])

    def _action(self, action: Action) -> None:
        stage, kind, index, _ = action
        needs = []
        if kind != "update":
            arrived = self.arriving.pop(
                ("forward" if kind == "forward" else "backward", stage, index), None
            )
            needs = [] if arrived is None else [arrived]
        if kind.startswith("backward") and (stage, index) in self.leaving:
            needs.append(self.leaving.pop((stage, index)))
        self._compute(self.costs.duration(kind), needs, action)

    def _compute(self, duration: float, needs: list[_Task], action: Action | None = None) -> _Task:
        task = _Task(duration, needs, action)
        self.queues[self.rank, "computing"].append(task)
        return task

    def _transfer(self, kind: str, stage: int, name: tuple[str, int, int]) -> _Task:
        other = self.homes[stage]
        # A transfer begins after the computation queued so far.
        before = self.queues[self.rank, "computing"][-1:]
        task = _Task(self.costs.communication, before)
        # Those that share a communicator.
        way = (self.rank, other) if kind.startswith("SEND") else (other, self.rank)
        self.queues[self.rank, way].append(task)
        self.halves[name].append(task)
        return task


def simulate_communicators(
    order: Order,
    costs: Costs = DEFAULT_COSTS,
    name: str = "",
    microbatches: int = 0,
) -> Timeline:
    """Simulate an order like :func:`hfscale.parallel.pipeline.simulate.simulate`, but with one transfer at a time, of
    ``costs.communication``, on each communicator.
    """
    homes = stage_ranks(order)
    queues: dict[Hashable, list[_Task]] = defaultdict(list)
    halves: dict[tuple[str, int, int], list[_Task]] = defaultdict(list)
    trains = any(action.kind != "forward" for row in order for action in row)
    for rank, program in enumerate(_programs(order, homes)):
        _Rank(rank, homes, costs, queues, halves, trains).run(program)
    for first, second in halves.values():
        first.other, second.other = second, first
    if not _play(queues):
        raise ConfigError(
            f"{name or 'this order'} would deadlock: its transfers wait for each other; reorder the actions"
        )
    rows = [
        [task for task in queues[rank, "computing"] if task.action] for rank in range(len(order))
    ]
    spans = (tuple(Span(t.action, t.start, t.end or 0.0) for t in row if t.action) for row in rows)
    return Timeline(tuple(spans), name=name, microbatches=microbatches)


def _programs(order: Order, homes: dict[int, int]) -> _Programs:
    if not any(action.kind == "update" for row in order for action in row):
        return rank_programs(order)
    last = max(homes)
    programs = []
    for row in order:  # without a flush, as AsynchronousPipeline runs it
        program: list[tuple[str, int, int]] = []
        for stage, kind, index, _ in row:
            letter = kind[0].upper()
            before, behind = (
                (stage > 0, stage < last) if kind == "forward" else (stage < last, stage > 0)
            )
            program += [(f"RECV_{letter}", stage, index)] if before and kind != "update" else []
            program.append((kind, stage, index))
            program += [(f"SEND_{letter}", stage, index)] if behind and kind != "update" else []
        programs.append(program)
    return programs


def _play(queues: dict[Hashable, list[_Task]]) -> bool:
    """Give every task its times; return whether all of them could run."""
    play = _Play(queues)
    while sum(play.advance(key) for key in queues):
        pass
    return all(play.at[key] == len(tasks) for key, tasks in queues.items())


class _Play:
    """Run the tasks of queues one after the other; the two halves of a transfer run together.

    Attributes:
        at: how many tasks of each queue have run.
        free: when the last of them ended.
    """

    def __init__(self, queues: dict[Hashable, list[_Task]]) -> None:
        self.queues = queues
        self.at, self.free = dict.fromkeys(queues, 0), dict.fromkeys(queues, 0.0)
        self._queue_of = {id(task): key for key, tasks in queues.items() for task in tasks}

    def advance(self, key: Hashable) -> int:
        """Run a queue's tasks until one must wait; return how many ran."""
        before = self.at[key]
        while (task := self._next(key)) is not None and self._run(
            [task, *([task.other] if task.other else [])]
        ):
            pass
        return self.at[key] - before

    def _next(self, key: Hashable) -> _Task | None:
        return self.queues[key][self.at[key]] if self.at[key] < len(self.queues[key]) else None

    def _run(self, halves: list[_Task]) -> bool:
        """Run the tasks if it is their turn and their inputs have arrived."""
        keys = [self._queue_of[id(half)] for half in halves]
        needs = [need.end for half in halves for need in half.needs]
        ready = [end for end in needs if end is not None]
        if [self._next(key) for key in keys] != halves or len(ready) < len(needs):
            return False
        begin = max([*(self.free[key] for key in keys), *ready])
        for key, half in zip(keys, halves, strict=True):
            half.start = begin
            half.end = begin + half.duration
            self.at[key], self.free[key] = self.at[key] + 1, begin + half.duration
        return True
