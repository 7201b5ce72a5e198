"""Simulate an order of actions with given durations, before anything runs."""

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
    """Hold the durations of one stage's actions, in any one unit."""

    forward: float = 1.0  # of one microbatch
    backward: float = 2.0  # gradients of inputs and weights
    backward_input: float = 1.0  # gradient of the input alone
    backward_weight: float = 1.0  # gradients of the weights alone
    update: float = 0.0
    communication: float = 0.0  # from one rank to the next; 0 between stages of one rank
    # A paired forward and backward; None is the sum of the two, as without overlap.
    pair: float | None = None
    stages: tuple[float, ...] = ()  # a factor per stage; empty if all take the same time

    def duration(self, kind: Kind, stage: int = 0) -> float:
        """Return the duration of one action."""
        return float(getattr(self, kind)) * (self.stages[stage] if self.stages else 1.0)


DEFAULT_COSTS = Costs()


def simulate(
    order: Order, costs: Costs = DEFAULT_COSTS, name: str = "", microbatches: int = 0
) -> Timeline:
    """Return the timeline of an order in which every action starts as soon as its rank and its inputs are ready.

    A forward needs the forward of the stage before; a backward (of the input) its own forward and the gradient of
    the stage after; a backward of the weights the backward of the input. Sending takes no rank's time. Raise
    :class:`ConfigError` if the ranks would wait for each other forever. ``microbatches`` of a step are counted if 0.
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
            f"{name or 'this order'} would deadlock, each rank waits for another: {', '.join(stuck)}; reorder them"
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
    """Return the spans of a piece's actions, or ``None`` if an input does not exist yet."""
    durations = [costs.duration(action.kind, action.stage) for action in piece]
    if len(piece) > 1 and costs.pair is not None:
        scale = costs.pair / sum(durations)
        durations = [duration * scale for duration in durations]
    spans: list[Span] = []
    own: dict[Result, float] = {}  # results of the pair so far
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
    ready.update(dict.fromkeys(own, now))  # results of a pair are sent when both actions are done
    return spans
