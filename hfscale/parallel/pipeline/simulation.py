"""Simulate a schedule's order of actions with given durations, without running the model."""

from dataclasses import dataclass

from ...errors import ConfigError
from .timeline import (
    GRADIENT,
    Action,
    Kind,
    Order,
    Result,
    Span,
    Timeline,
    needs,
    play,
    stage_ranks,
)


@dataclass(frozen=True)
class Costs:
    """Hold the durations of a stage's actions, all in the same unit."""

    forward: float = 1.0  # forward pass of one microbatch
    backward: float = 2.0  # backward pass: gradients of inputs and weights
    backward_input: float = 1.0  # first half of a backward pass: the gradient of the input
    backward_weight: float = 1.0  # second half of a backward pass: the gradients of the weights
    update: float = 0.0  # optimizer step of a stage
    communication: float = 0.0  # transfer from one rank to the next; stages on one rank need none
    # a paired forward and backward pass; ``None`` for the sum of the two durations, as without overlap
    pair: float | None = None
    # a factor of the durations per stage; empty if all stages take the same time
    stages: tuple[float, ...] = ()

    def duration(self, kind: Kind, stage: int = 0) -> float:
        """Return the duration of an action of ``kind`` on ``stage``."""
        return float(getattr(self, kind)) * (self.stages[stage] if self.stages else 1.0)


DEFAULT_COSTS = Costs()


def simulate(
    order: Order, costs: Costs = DEFAULT_COSTS, name: str = "", microbatches: int = 0
) -> Timeline:
    """Return the timeline of an order in which every action starts as soon as its rank and its inputs are ready.

    A forward pass needs the forward pass of the stage before. A backward pass (or its first half, for the input) needs
    the forward pass of its own stage and the gradient from the stage after. The second half, for the weights, needs the
    first half. A transfer delays its receiver but keeps no rank busy. ``microbatches`` is the number per step; 0:
    count them in ``order``.

    Raises:
        ConfigError: the ranks would wait for each other forever.
    """
    home = stage_ranks(order)
    last = max(home)
    ready: dict[Result, float] = {}
    spans: list[list[Span]] = [[] for _ in order]
    clock = [0.0] * len(order)

    def run(rank: int, piece: list[Action]) -> bool:
        done = _run(piece, clock[rank], costs, home, last, ready)
        if done is None:
            return False
        spans[rank] += done
        clock[rank] = done[-1].end
        return True

    stuck = [
        f"rank {rank} at {kind.replace('_', ' of the ')} of stage {stage}, microbatch {index}"
        for rank, piece in enumerate(play(order, run))
        for stage, kind, index, _ in piece[:1]
    ]
    if stuck:
        raise ConfigError(
            f"{name or 'this order'} would deadlock, because each of these ranks waits for another rank: "
            f"{', '.join(stuck)}: change the order of these actions"
        )
    return Timeline(tuple(map(tuple, spans)), name=name, microbatches=microbatches)


def _run(
    piece: list[Action],
    now: float,
    costs: Costs,
    home: dict[int, int],
    last: int,
    ready: dict[Result, float],
) -> list[Span] | None:
    """Return the start and end of each action in ``piece``, one action or a pair that begins together.

    Return ``None`` if an input of an action does not exist yet.
    """
    durations = [costs.duration(action.kind, action.stage) for action in piece]
    if len(piece) > 1 and costs.pair is not None:
        scale = costs.pair / sum(durations)
        durations = [duration * scale for duration in durations]
    spans: list[Span] = []
    own: dict[Result, float] = {}  # results of this piece so far
    for action, duration in zip(piece, durations, strict=True):
        for need in needs(action, last):
            made = own.get(need, ready.get(need))
            if made is None:
                return None
            now = max(
                now,
                made + costs.communication * (home[need[0]] != home[action.stage]),
            )
        spans.append(Span(action, now, now + duration))
        now += duration
        if action.kind in ("forward", *GRADIENT):
            own[
                action.stage,
                "activation" if action.kind == "forward" else "gradient",
                action.microbatch,
            ] = now
    # the results of a pair are sent after both actions are done
    ready.update(dict.fromkeys(own, now))
    return spans
