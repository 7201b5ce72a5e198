"""Orders of the schedules with several stages on a rank; imports no torch, so that the CLI draws them at once.

Stage ``s`` lives on rank ``s % p``; in the V-shaped schedules (``zbv``, ``dualpipev``) rank ``r`` has stages ``r`` and
``2 p - 1 - r``. They are the orders of ``torch.distributed.pipelining``'s schedule classes, action for action.
"""

from collections import deque
from collections.abc import Callable
from itertools import zip_longest

from .timeline import Action, Kind, Order


def several_stages_order(schedule: str, pp_size: int, num_microbatches: int, virtual_stages: int) -> Order:
    """Return the actions of each rank; the numbers must be ones that ``schedule`` can run."""
    row = _ROWS[schedule]
    return tuple(tuple(row(rank, pp_size, num_microbatches, virtual_stages)) for rank in range(pp_size))


def _breadth_first(rank: int, pp_size: int, num_microbatches: int, virtual_stages: int) -> list[Action]:
    """Run all microbatches through one stage, then through the next; backward in reverse (Lamy-Poirier 2023)."""
    stages = range(rank, pp_size * virtual_stages, pp_size)
    forward = [Action(stage, "forward", index) for stage in stages for index in range(num_microbatches)]
    return forward + [action._replace(kind="backward") for action in reversed(forward)]


def _interleaved(rank: int, pp_size: int, num_microbatches: int, virtual_stages: int) -> list[Action]:
    """Interleave forwards and backwards (Narayanan et al. 2021b): each round of microbatches runs through all stages
    of the rank before the next round.
    """
    forward = _in_rounds("forward", rank, pp_size, num_microbatches, virtual_stages)
    backward = _in_rounds("backward", rank, pp_size, num_microbatches, virtual_stages)
    warmup = _warmup(2 * (pp_size - 1 - rank), pp_size, num_microbatches, virtual_stages)
    return forward[:warmup] + _alternating(forward[warmup:], backward)


def _interleaved_zero_bubble(rank: int, pp_size: int, num_microbatches: int, virtual_stages: int) -> list[Action]:
    """Interleave, with weight gradients delayed by ``rank`` passes behind input gradients (ZB-H1, Qi et al. 2023)."""
    forward = _in_rounds("forward", rank, pp_size, num_microbatches, virtual_stages)
    inputs = _in_rounds("backward_input", rank, pp_size, num_microbatches, virtual_stages)
    weights = [action._replace(kind="backward_weight") for action in inputs]
    warmup = _warmup(pp_size - 1 - rank, pp_size, num_microbatches, virtual_stages)
    return forward[:warmup] + _alternating(forward[warmup:], inputs, [None] * min(rank, len(inputs)) + weights)


def _in_rounds(kind: Kind, rank: int, pp_size: int, num_microbatches: int, virtual_stages: int) -> list[Action]:
    """List one action per stage of the rank and microbatch, in rounds; backward from the last stage to the first."""
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


def _warmup(hops: int, pp_size: int, num_microbatches: int, virtual_stages: int) -> int:
    """Count the forwards before the first backward; a rank's first gradient comes ``hops`` passes after the last's."""
    rounds = (virtual_stages - 1) * _round_size(pp_size, num_microbatches)
    return min(rounds + hops, num_microbatches * virtual_stages)


def _alternating(*lists: "list[Action] | list[Action | None]") -> list[Action]:
    """Merge lists: the first entry of each, then the second of each, and so on, without gaps."""
    return [action for actions in zip_longest(*lists) for action in actions if action is not None]


class _Row:
    """Builder of one rank's actions; the microbatches of each stage and kind are numbered in order."""

    def __init__(self, rank: int, pp_size: int) -> None:
        self.down, self.up = rank, 2 * pp_size - 1 - rank
        self.actions: list[Action] = []
        self.waiting: deque[tuple[int, int]] = deque()  # (stage, microbatch) whose weight gradients are queued
        self._done: dict[tuple[int, Kind], int] = {}

    def done(self, stage: int, kind: Kind) -> int:
        """Return how many actions of this stage and kind are listed."""
        return self._done.get((stage, kind), 0)

    def forward(self, stage: int, paired: bool = False) -> None:
        self.actions.append(Action(stage, "forward", self._next(stage, "forward"), paired))

    def backward(self, stage: int) -> None:
        self.actions.append(Action(stage, "backward", self._next(stage, "backward")))

    def inputs(self, stage: int) -> None:
        """Append the next input gradient of ``stage``, and queue its weight gradient."""
        index = self._next(stage, "backward")
        self.actions.append(Action(stage, "backward_input", index))
        self.waiting.append((stage, index))

    def weights(self, stage: int | None = None) -> None:
        """Append the weight gradient that is queued longest, of ``stage`` or of any; do nothing if none is."""
        found = next((entry for entry in self.waiting if stage in (None, entry[0])), None)
        if found:
            self.waiting.remove(found)
            self.actions.append(Action(found[0], "backward_weight", found[1]))

    def _next(self, stage: int, kind: Kind) -> int:
        self._done[stage, kind] = self.done(stage, kind) + 1
        return self._done[stage, kind] - 1


def _zbv(rank: int, pp_size: int, num_microbatches: int, _: int) -> list[Action]:
    """ZB-V (Qi et al. 2023): as many forwards as fill the V, then one each of forward, input and weight gradient, the
    weight gradients of the end where a rank would wait.
    """
    row, total = _Row(rank, pp_size), max(2 * pp_size - 1, num_microbatches)  # fewer would not fill it: left out below
    for _i in range(2 * (pp_size - rank) - 1):
        row.forward(row.down)
    for _i in range(rank):
        row.forward(row.up)
        row.forward(row.down)
    for _i in range(pp_size - rank):
        _forward_and_halves(row, row.up, row.up)
    while row.done(row.up, "forward") < total:
        if row.done(row.down, "forward") < total:
            row.forward(row.down)
        row.inputs(row.down)
        row.weights(row.down)
        _forward_and_halves(row, row.up, row.up)
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


def _forward_and_halves(row: _Row, forward: int, backward: int) -> None:
    row.forward(forward)
    row.inputs(backward)
    row.weights(backward)


def _dualpipev(rank: int, pp_size: int, num_microbatches: int, _: int) -> list[Action]:
    """DualPipeV (DeepSeek 2025): where the V is full, a forward is one piece with a backward of the other stage."""
    row, behind = _Row(rank, pp_size), pp_size - rank - 1  # ranks behind this one
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
        row.forward(row.down, paired=step > 0 or behind > 0)  # the last rank's first would make the others wait
        row.backward(row.up)
        row.forward(row.up, paired=True)
        row.backward(row.down)
    for _i in range(behind):
        row.backward(row.up)
        row.forward(row.up, paired=True)
        row.backward(row.down)
    # The rest in halves from its middle on, so that the ranks before this one have their gradients sooner.
    for step in range(2 * (rank + 1)):
        halves = step > 2 * ((rank + 1) // 2) - rank % 2
        (row.inputs if halves else row.backward)(row.down if step % 2 else row.up)
    for _i in range(behind):
        row.weights()
        row.inputs(row.down)
    for _i in range(rank + 1):
        row.weights()
    return row.actions


_ROWS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "interleaved1f1b": _interleaved,
    "looped_bfs": _breadth_first,
    "interleaved_zero_bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
