"""Order the actions of each rank for every schedule; this module imports no torch, so that the CLI draws quickly.

Stage ``s`` is on rank ``s % p`` of ``p`` ranks; in the V-shaped schedules (``zbv``, ``dualpipev``) rank ``r`` has
stages ``r`` and ``2 p - 1 - r``. Schedules with several stages per rank have the same orders, action for action, as the
schedule classes of ``torch.distributed.pipelining``.
"""

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.schedules import Schedule, schedule_names, schedule_of
from ...errors import ConfigError
from .csv_table import read_csv
from .timeline import Action, Kind, Order


def _breadth_first(
    rank: int, pp_size: int, num_microbatches: int, virtual_stages: int
) -> list[Action]:
    """Return the actions of one rank in the breadth-first order (Lamy-Poirier 2023): all microbatches pass through one
    stage before the next stage begins.

    Backward passes take the stages in reverse order.
    """
    stages = range(rank, pp_size * virtual_stages, pp_size)
    forward = [
        Action(stage, "forward", index) for stage in stages for index in range(num_microbatches)
    ]
    return forward + [action._replace(kind="backward") for action in reversed(forward)]


def _interleaved(
    rank: int, pp_size: int, num_microbatches: int, virtual_stages: int, halves: bool = False
) -> list[Action]:
    """Return the actions of one rank in interleaved 1F1B (Narayanan et al. 2021b).

    With ``halves``, each backward pass is split, and weight gradients are computed later (ZB-H1, Qi et al. 2023).
    """
    forward = _in_rounds("forward", rank, pp_size, num_microbatches, virtual_stages)
    backward = _in_rounds(
        "backward_input" if halves else "backward", rank, pp_size, num_microbatches, virtual_stages
    )
    weights = [action._replace(kind="backward_weight") for action in backward] if halves else []
    # warmup: forward passes before the first backward pass, which starts ``hops`` actions later than on the last rank
    hops = (1 if halves else 2) * (pp_size - 1 - rank)
    rounds = (virtual_stages - 1) * _round_size(pp_size, num_microbatches)
    warmup = min(rounds + hops, num_microbatches * virtual_stages)
    later: list[Action | None] = [None] * min(rank, len(backward)) + weights
    # take one action from each of the three lists in turn, until all lists are used up
    turns = chain(*zip_longest(forward[warmup:], backward, later))
    return [*forward[:warmup], *filter(None, turns)]


def _in_rounds(
    kind: Kind, rank: int, pp_size: int, num_microbatches: int, virtual_stages: int
) -> list[Action]:
    """List one action of ``kind`` for every stage of the rank and every microbatch.

    The actions come in rounds: one round runs the same few microbatches (about ``pp_size``) through all stages of the
    rank. Forward rounds begin with the rank's first stage, backward rounds with the rank's last stage.
    """
    size = _round_size(pp_size, num_microbatches)
    stages = [rank + place * pp_size for place in range(virtual_stages)]
    return [
        Action(stage, kind, index)
        for first in range(0, num_microbatches, size)
        for stage in (stages if kind == "forward" else reversed(stages))
        for index in range(first, first + size)
    ]


def _round_size(pp_size: int, num_microbatches: int) -> int:
    return num_microbatches // max(1, num_microbatches // pp_size)


class _Row:
    """Build the action list of one rank of a V-shaped schedule.

    The rank has two stages: ``down`` on the first arm of the V and ``up`` on the second. The actions of one kind on one
    stage run on the microbatches in order: 0, 1, 2, ...
    """

    def __init__(self, rank: int, pp_size: int) -> None:
        self.down = rank
        self.up = 2 * pp_size - 1 - rank
        self.actions: list[Action] = []
        # (stage, microbatch) of deferred weight gradients, the oldest first
        self.waiting: deque[tuple[int, int]] = deque()
        # (stage, kind) -> number of microbatches with this action
        self.done = Counter[tuple[int, Kind]]()

    def forward(self, stage: int, paired: bool = False) -> None:
        self.actions.append(Action(stage, "forward", self._next(stage, "forward"), paired))

    def backward(self, stage: int) -> None:
        self.actions.append(Action(stage, "backward", self._next(stage, "backward")))

    def inputs(self, stage: int) -> None:
        """Append a backward pass on ``stage`` that computes only the gradient of the input, and put off its weight
        gradients.
        """
        index = self._next(stage, "backward")
        self.actions.append(Action(stage, "backward_input", index))
        self.waiting.append((stage, index))

    def weights(self, stage: int | None = None) -> None:
        """Append the computation of weight gradients that was put off first, of ``stage`` or (``None``) of any stage,
        if there is one.
        """
        waiting = next((entry for entry in self.waiting if stage in (None, entry[0])), None)
        if waiting:
            self.waiting.remove(waiting)
            self.actions.append(Action(waiting[0], "backward_weight", waiting[1]))

    def _next(self, stage: int, kind: Kind) -> int:
        self.done[stage, kind] += 1
        return self.done[stage, kind] - 1


def _zbv(rank: int, pp_size: int, num_microbatches: int, _: int) -> list[Action]:
    """Return the actions of one rank in the ZB-V schedule (Qi et al. 2023).

    The rank first runs forward passes until the V is full, and then alternates forward pass, input gradient and weight
    gradient. The weight gradients that remain are computed where the rank would otherwise wait.
    """
    # Too few microbatches would not fill the V: more are scheduled, and the extra ones removed at the end.
    row = _Row(rank, pp_size)
    total = max(2 * pp_size - 1, num_microbatches)
    for _i in range(2 * (pp_size - rank) - 1):
        row.forward(row.down)
    for _i in range(rank):
        row.forward(row.up)
        row.forward(row.down)
    while row.done[row.up, "forward"] < total:
        if row.done[row.up, "forward"] >= pp_size:  # the V is full
            if row.done[row.down, "forward"] < total:
                row.forward(row.down)
            row.inputs(row.down)
            row.weights(row.down)
        row.forward(row.up)
        row.inputs(row.up)
        row.weights(row.up)
    for _i in range(rank):
        row.inputs(row.down)
        row.inputs(row.up)
    for _i in range(pp_size - rank):
        row.inputs(row.down)
        row.weights(row.down)
    for stage in (row.up, row.down):
        while any(waiting == stage for waiting, _index in row.waiting):
            row.weights(stage)
    return [action for action in row.actions if action.microbatch < num_microbatches]


def _dualpipev(rank: int, pp_size: int, num_microbatches: int, _: int) -> list[Action]:
    """Return the actions of one rank in the DualPipeV schedule (DeepSeek 2025).

    The rank first runs forward passes until the V is full, and then pairs forward passes of one stage with backward
    passes of its other stage.
    """
    row = _Row(rank, pp_size)
    behind = pp_size - rank - 1  # number of ranks after this one
    for _i in range(2 * behind):
        row.forward(row.down)
    for _i in range(rank + 1):
        row.forward(row.down)
        row.forward(row.up)
    for _i in range(behind):
        row.inputs(row.up)
        row.weights()
        row.forward(row.up)
    for step in range(num_microbatches - 2 * pp_size + rank + 1):
        # Not on the last rank in the first step, where pairing would make all other ranks wait.
        row.forward(row.down, paired=step > 0 or behind > 0)
        row.backward(row.up)
        row.forward(row.up, paired=True)
        row.backward(row.down)
    for _i in range(behind):
        row.backward(row.up)
        row.forward(row.up, paired=True)
        row.backward(row.down)
    # From the middle of the remaining backward passes on, run halves, so that earlier ranks get their gradients sooner.
    for step in range(2 * (rank + 1)):
        halves = step > 2 * ((rank + 1) // 2) - rank % 2
        (row.inputs if halves else row.backward)(row.down if step % 2 else row.up)
    for _i in range(behind):
        row.weights()
        row.inputs(row.down)
    for _i in range(rank + 1):
        row.weights()
    return row.actions


def _gpipe(rank: int, pp_size: int, num_microbatches: int, _: int) -> list[Action]:
    kinds: tuple[Kind, Kind] = ("forward", "backward")
    return [Action(rank, kind, index) for kind in kinds for index in range(num_microbatches)]


def one_forward_one_backward(
    stage: int,
    pp_size: int,
    total: int,
    _: int = 1,
) -> list[Action]:
    """Return the 1F1B order of one stage over ``total`` microbatches, at most ``pp_size - stage`` of them in flight."""
    warmup = min(pp_size - stage, total)
    actions = [Action(stage, "forward", index) for index in range(warmup)]
    for index in range(total):
        actions.append(Action(stage, "backward", index))
        if warmup + index < total:
            actions.append(Action(stage, "forward", warmup + index))
    return actions


_ROWS: dict[
    str,
    Callable[
        [
            int,
            int,
            int,
            int,
        ],
        list[Action],
    ],
] = {
    "gpipe": _gpipe,
    "1f1b": one_forward_one_backward,  # torch's own listing starts the last stage at microbatch 1, but runs this order
    "interleaved1f1b": _interleaved,
    "looped_bfs": _breadth_first,
    "interleaved_zero_bubble": partial(_interleaved, halves=True),
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}


if TYPE_CHECKING:
    from ...config.parallel import ParallelConfig


def order(
    schedule: str, pp_size: int, num_microbatches: int, virtual_stages: int = 1, steps: int = 1
) -> Order:
    """Return, per rank, the sequence of its actions.

    Schedules are ``gpipe`` (Huang et al. 2019), ``1f1b`` (PipeDream-Flush, Narayanan et al. 2021a), ``interleaved1f1b``
    (PTD-P, Narayanan et al. 2021b), ``looped_bfs`` (breadth-first, Lamy-Poirier 2023), ``interleaved_zero_bubble``
    (ZB-H1 over virtual stages) and ``zbv`` (Qi et al. 2023), ``dualpipev`` (DeepSeek 2025), the schedules of
    extensions, or the path of a CSV file in torch's format (see :func:`read_csv`).

    Args:
        schedule: one of the names above.
        pp_size: number of pipeline ranks ``p``.
        num_microbatches: number of microbatches per step.
        virtual_stages: stages per rank. Stage ``s`` is on rank ``s % pp_size``. For ``zbv`` and ``dualpipev``, which
            need exactly two, the stages are on ranks ``0 .. p-1, p-1 .. 0``.
        steps: number of consecutive steps; more than one only for schedules without a flush between steps.
    """
    check(schedule, pp_size, num_microbatches, virtual_stages, steps)
    if schedule.endswith(".csv"):
        rows = read_csv(Path(schedule))
        stages = 1 + max(action.stage for actions in rows for action in actions)
        passes = 1 + max(
            action.microbatch for actions in rows for action in actions if action.kind == "forward"
        )
        if (len(rows), stages, passes) != (pp_size, pp_size * virtual_stages, num_microbatches):
            raise ConfigError(
                f"{schedule} is a schedule of {len(rows)} ranks, {stages} stages and {passes} microbatches: use "
                f"pp_size={len(rows)}, virtual_stages={stages // len(rows)}, num_microbatches={passes}"
            )
        return rows
    own = schedule_of(schedule).order
    if own is not None:
        added: Order = own(pp_size, num_microbatches, steps)
        return added
    row = _ROWS[schedule]
    return tuple(
        tuple(row(rank, pp_size, num_microbatches, virtual_stages)) for rank in range(pp_size)
    )


def order_of(layout: "ParallelConfig", num_microbatches: int, steps: int = 1) -> Order:
    """Return, per rank, the sequence of its actions in a layout's schedule: see :func:`order`."""
    virtual = int(layout.virtual_stages or 1)
    return order(str(layout.pipeline_schedule), layout.pp, num_microbatches, virtual, steps)


def check(
    schedule: str, pp_size: int, num_microbatches: int, virtual_stages: int = 1, steps: int = 1
) -> None:
    """Raise :class:`ConfigError` if ``schedule`` cannot run with these numbers of ranks, microbatches, stages and
    steps; the error names numbers that it can run with.
    """
    for name, value in (
        ("pp_size", pp_size),
        ("num_microbatches", num_microbatches),
        ("steps", steps),
    ):
        if value < 1:
            raise ConfigError(f"{name}={value} is invalid: use a whole number of at least 1")
    names = schedule_names()
    if schedule not in names and not schedule.endswith(".csv"):
        raise ConfigError(
            f"schedule {schedule!r} is unknown: use one of {', '.join(names)}, or a .csv file"
        )
    described = schedule_of(schedule)
    valid = described.stages_per_rank
    if virtual_stages not in valid:
        values = str(valid[0]) if len(valid) == 1 else f"{valid[0]} or more"
        raise ConfigError(
            f"virtual_stages={virtual_stages} does not fit {schedule}: use {values}{_why_virtual(described)}"
        )
    least = max(1, described.microbatches_per_rank * pp_size)
    if num_microbatches < least:
        raise ConfigError(
            f"num_microbatches={num_microbatches} is too few for {schedule} over pp_size={pp_size}: use {least} or more"
        )
    if described.in_rounds and not _whole_rounds(num_microbatches, pp_size):
        below = next(m for m in range(num_microbatches - 1, 0, -1) if _whole_rounds(m, pp_size))
        above = next(m for m in count(num_microbatches + 1) if _whole_rounds(m, pp_size))
        raise ConfigError(
            f"num_microbatches={num_microbatches} does not divide into {num_microbatches // pp_size} groups of equal "
            f"size, in which {schedule} over pp_size={pp_size} runs microbatches: use {below} or {above} (any "
            "multiple of pp_size is valid)"
        )
    if steps > 1 and described.flushes:
        raise ConfigError(
            f"steps={steps}: {schedule} ends every step with a flush, so a drawing of several steps would repeat the "
            "first one: use steps=1"
        )


def check_layout(layout: "ParallelConfig") -> None:
    """Raise :class:`ConfigError` if a layout's schedule cannot run its stages and microbatches.

    A CSV file is checked later, when it is read.
    """
    schedule = str(layout.pipeline_schedule)
    ranks = layout.pp
    if ranks > 1 and not schedule.endswith(".csv"):
        # 2 * ranks microbatches are the default here, because all schedules accept this number.
        check(
            schedule, ranks, layout.num_microbatches or 2 * ranks, int(layout.virtual_stages or 1)
        )


def _why_virtual(schedule: Schedule) -> str:
    if schedule.v_shaped:
        return " (the stages run down the ranks and up again)"
    if len(schedule.stages_per_rank) == 1:
        return " (it keeps one stage per rank; interleaved1f1b and looped_bfs can have several)"
    return f" (with one stage per rank it is {schedule.with_one_stage})"


def _whole_rounds(num_microbatches: int, pp_size: int) -> bool:
    return num_microbatches % max(1, num_microbatches // pp_size) == 0
