"""Represent the actions of each rank of a pipeline, their order, and their times, as pure data.

An :class:`Action` is one computation of one stage on one microbatch. An *order* has, per rank, the sequence of its
actions. A :class:`Timeline` has the start and end of every action. Stages are numbered along the model, over all ranks;
rank 0 holds stage 0.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["forward", "backward", "backward_input", "backward_weight", "update"]
KINDS: tuple[Kind, ...] = ("forward", "backward", "backward_input", "backward_weight", "update")
"""``backward`` computes the gradients of inputs and weights at once; ``backward_input`` and ``backward_weight`` are
its two halves; ``update`` is the optimizer's step on a stage."""
LETTERS: dict[Kind, str] = dict(zip(KINDS, "FBIWU", strict=True))
GRADIENT: tuple[Kind, Kind] = ("backward", "backward_input")
"""The kinds of actions that compute the gradient of a stage's input, for which the stage before waits."""
RELEASE: tuple[Kind, Kind] = ("backward", "backward_weight")
"""The kinds of actions after which the activations of a microbatch on the stage are no longer needed."""
# A result: (stage, ``"activation"`` or ``"gradient"``, microbatch). The gradient is that of the stage's input.
Result: TypeAlias = tuple[int, str, int]


class Action(NamedTuple):
    """Describe one computation of a pipeline: which stage does what on which microbatch."""

    stage: int
    kind: Kind  # one of :data:`KINDS`
    microbatch: int  # number of the microbatch; for an ``update``, the number of the update
    # whether the action runs together with the next action of its rank (the overlapped forward and backward passes of
    # DeepSeek's DualPipe); the results of such a pair are sent after both actions are done
    paired: bool = False


Order: TypeAlias = tuple[tuple[Action, ...], ...]  # per rank, its actions in sequence


@dataclass(frozen=True)
class Span:
    """Hold one action with its ``start`` and ``end``, in the units of its timeline."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Hold the times at which the ranks of a pipeline ran their actions."""

    ranks: tuple[tuple[Span, ...], ...]  # per rank, its spans in the order of their start times
    name: str = ""
    # the unit of all times: ``"s"`` for seconds, or the name of an arbitrary unit
    unit: str = "forwards"
    microbatches: int = 0  # number of microbatches in one step; 0 if unknown: they are then counted

    def spans(self) -> Iterator[tuple[int, Span]]:
        """Yield ``(rank, span)`` for every span, that is an action with its start and end, on all ranks."""
        return ((rank, span) for rank, spans in enumerate(self.ranks) for span in spans)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return 1 + max((span.action.stage for _, span in self.spans()), default=-1)

    @property
    def virtual_stages(self) -> int:
        """The number of stages per rank."""
        return self.num_stages // max(self.num_ranks, 1)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches in one step."""
        counted = 1 + max(
            (span.action.microbatch for _, span in self.spans() if span.action.kind == "forward"),
            default=-1,
        )
        return self.microbatches or counted

    @property
    def start(self) -> float:
        """The time at which the first action began."""
        return min((span.start for _, span in self.spans()), default=0.0)

    @property
    def end(self) -> float:
        """The time at which the last action ended."""
        return max((span.end for _, span in self.spans()), default=0.0)

    @property
    def makespan(self) -> float:
        """The time from the start of the first action to the end of the last action, over all ranks."""
        return self.end - self.start

    @property
    def longest_span(self) -> float:
        """The longest time of a rank from the start of its first to the end of its last action.

        This is the cost of Qi et al. 2023, section 5. It is shorter than :attr:`makespan` if ranks begin and end one
        after the other, so that consecutive steps can overlap.
        """
        return max((spans[-1].end - spans[0].start for spans in self.ranks if spans), default=0.0)

    @property
    def work(self) -> float:
        """The busy time of the busiest rank, which is the ideal length of the step."""
        return max(map(_busy, self.ranks), default=0.0)

    @property
    def bubble(self) -> float:
        """The bubble time divided by the ideal time, ``makespan / work - 1``: ``(p-1)/m`` for GPipe and 1F1B."""
        return self.makespan / self.work - 1 if self.work else 0.0

    @property
    def span_bubble(self) -> float:
        """The bubble as papers on zero-bubble schedules define it, ``longest_span / work - 1``."""
        return self.longest_span / self.work - 1 if self.work else 0.0

    @property
    def idle(self) -> float:
        """The fraction of all ranks' time, between the first and the last action, that ranks spend waiting."""
        total = self.makespan * self.num_ranks
        return 1 - sum(map(_busy, self.ranks)) / total if total else 0.0

    @property
    def steady_idle(self) -> float | None:
        """The fraction of time that ranks spend waiting while the pipeline is full; ``None`` if the run is too short.

        The pipeline is full from the time when all ranks have run a backward pass until one rank starts its last
        forward pass.
        """
        begin = max(
            min((s.end for s in spans if s.action.kind in GRADIENT), default=0.0)
            for spans in self.ranks
        )
        end = min(
            max((s.start for s in spans if s.action.kind == "forward"), default=0.0)
            for spans in self.ranks
        )
        if end <= begin:
            return None
        busy = sum(_busy(spans, begin, end) for spans in self.ranks)
        return 1 - busy / ((end - begin) * self.num_ranks)

    def peak_live(self) -> tuple[int, ...]:
        """Return, per stage, the largest number of microbatches in flight: between their forward pass and the end of
        their backward pass.
        """
        return peak_live(tuple(tuple(span.action for span in spans) for spans in self.ranks))


def pieces_of(actions: Sequence[Action]) -> list[list[Action]]:
    """Group a rank's actions into the units that are run at once: single actions, or pairs of actions that begin
    together.
    """
    pieces: list[list[Action]] = [[]]
    for action in actions:
        pieces[-1].append(action)
        if not action.paired:
            pieces.append([])
    return [piece for piece in pieces if piece]


def needs(action: Action, last: int) -> list[Result]:
    """Return the activations and gradients that must exist before an action can begin; ``last`` is the number of the
    last stage.
    """
    stage, kind, index, _ = action
    if kind == "forward":
        return [(stage - 1, "activation", index)] if stage else []
    if kind in GRADIENT:
        return [
            (stage, "activation", index),
            *([(stage + 1, "gradient", index)] if stage < last else []),
        ]
    return [(stage, "gradient", index)] if kind == "backward_weight" else []


def play(
    order: Order,
    run: Callable[
        [
            int,
            list[Action],
        ],
        bool,
    ],
) -> list[list[Action]]:
    """Let the ranks of a pipeline take turns: call ``run(rank, actions)`` for each rank, with the rank's next action or
    pair of actions that begin together, until no rank can continue.

    ``run`` returns whether the actions ran. Return, per rank, the actions that could not run; empty if the rank
    finished.
    """
    waiting = [deque(pieces_of(actions)) for actions in order]
    moved = True
    while moved:
        moved = False
        for rank, pieces in enumerate(waiting):
            if pieces and run(rank, pieces[0]):
                pieces.popleft()
                moved = True
    return [pieces[0] if pieces else [] for pieces in waiting]


def peak_live(order: Order) -> tuple[int, ...]:
    """Return, per stage, the largest number of microbatches in flight: those that have run their forward pass, and
    whose weight gradients are not computed yet.
    """
    every = [action for actions in order for action in actions]
    stages = range(1 + max((action.stage for action in every), default=-1))
    return fullest_live(
        tuple(tuple(a for a in every if a.stage == stage) for stage in stages), [1] * len(stages)
    )


def fullest_live(order: Order, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return, per stage, the microbatches that it holds at the time when all stages of its rank hold the most in total.

    For the total, the microbatches of each stage are weighted by the stage's size in ``sizes``.
    """
    alive = [0] * len(sizes)
    fullest = [0] * len(sizes)
    for actions in order:
        most = 0
        own = {action.stage for action in actions}
        for action in actions:
            alive[action.stage] += (action.kind == "forward") - (action.kind in RELEASE)
            total = sum(alive[stage] * sizes[stage] for stage in own)
            if total > most:
                most = total
                for stage in own:
                    fullest[stage] = alive[stage]
    return tuple(fullest)


def stage_ranks(order: Order) -> dict[int, int]:
    """Return the rank that holds each stage, by the stage's number."""
    return {action.stage: rank for rank, actions in enumerate(order) for action in actions}


def _busy(spans: tuple[Span, ...], begin: float = -inf, end: float = inf) -> float:
    return sum(
        max(
            0.0,
            min(span.end, end) - max(span.start, begin),
        )
        for span in spans
    )
