"""The actions of each rank of a pipeline, their order, and their times: pure data.

An :class:`Action` is one computation of one stage on one microbatch; an *order* is, per rank, its actions in sequence;
a :class:`Timeline` says when each ran. Stages are numbered along the model over all ranks; rank 0 holds stage 0.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["forward", "backward", "backward_input", "backward_weight", "update"]
KINDS: tuple[Kind, ...] = ("forward", "backward", "backward_input", "backward_weight", "update")
"""``backward`` computes the gradients of inputs and weights at once; ``backward_input`` and ``backward_weight`` are
its two halves; ``update`` is the optimizer's step on a stage."""
LETTERS: dict[Kind, str] = dict(zip(KINDS, "FBIWU", strict=True))
GRADIENT: tuple[Kind, Kind] = ("backward", "backward_input")
"""The kinds that make the gradient which the stage before waits for."""
RELEASE: tuple[Kind, Kind] = ("backward", "backward_weight")
"""The kinds after which a microbatch's activations are no longer needed."""
# A stage's ``"activation"`` or ``"gradient"`` (of its input) of a microbatch.
Result: TypeAlias = tuple[int, str, int]


class Action(NamedTuple):
    """Describe one computation."""

    stage: int
    kind: Kind  # one of :data:`KINDS`
    microbatch: int  # number of the microbatch; of an ``update``, the number of the update
    # it runs as one piece with the next action of its rank (the overlapped forward and backward of DeepSeek's
    # DualPipe): what the two send leaves when both are done
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
    """Hold when the ranks of a pipeline ran which action."""

    ranks: tuple[tuple[Span, ...], ...]  # per rank, its spans by start time
    name: str = ""
    unit: str = "forwards"  # what 1.0 is: ``"s"`` for seconds, or the name of an arbitrary unit
    microbatches: int = 0  # number of microbatches in one step; 0 where unknown, and then counted

    def spans(self) -> Iterator[tuple[int, Span]]:
        """Yield every span with its rank."""
        return ((rank, span) for rank, spans in enumerate(self.ranks) for span in spans)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return 1 + max((span.action.stage for _, span in self.spans()), default=-1)

    @property
    def virtual_stages(self) -> int:
        """Stages per rank."""
        return self.num_stages // max(self.num_ranks, 1)

    @property
    def num_microbatches(self) -> int:
        """Microbatches in one step."""
        counted = 1 + max(
            (span.action.microbatch for _, span in self.spans() if span.action.kind == "forward"),
            default=-1,
        )
        return self.microbatches or counted

    @property
    def start(self) -> float:
        """When the first action began."""
        return min((span.start for _, span in self.spans()), default=0.0)

    @property
    def end(self) -> float:
        """When the last action ended."""
        return max((span.end for _, span in self.spans()), default=0.0)

    @property
    def makespan(self) -> float:
        """Time from the first action's start to the last one's end, over all ranks."""
        return self.end - self.start

    @property
    def longest_span(self) -> float:
        """The longest that a rank took from its first action to its last (the cost of Qi et al. 2023, section 5):
        shorter than :attr:`makespan` where ranks begin and end one after the other, so that steps can overlap.
        """
        return max((spans[-1].end - spans[0].start for spans in self.ranks if spans), default=0.0)

    @property
    def work(self) -> float:
        """Busy time of the busiest rank: the step's ideal length."""
        return max(
            (_busy(spans, float("-inf"), float("inf")) for spans in self.ranks),
            default=0.0,
        )

    @property
    def bubble(self) -> float:
        """Bubble time over ideal time, ``makespan / work - 1``: ``(p-1)/m`` for GPipe and 1F1B."""
        return self.makespan / self.work - 1 if self.work else 0.0

    @property
    def span_bubble(self) -> float:
        """``longest_span / work - 1``: the bubble as zero-bubble schedules count it."""
        return self.longest_span / self.work - 1 if self.work else 0.0

    @property
    def idle(self) -> float:
        """Fraction of all ranks' time, between the first action and the last, spent waiting."""
        total = self.makespan * self.num_ranks
        busy = sum(_busy(spans, float("-inf"), float("inf")) for spans in self.ranks)
        return 1 - busy / total if total else 0.0

    @property
    def steady_idle(self) -> float | None:
        """Fraction waited between all stages' first backward and last forward; ``None`` for a run too short."""
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
        """Return, per stage, the most microbatches between their forward and the end of their backward."""
        return peak_live(tuple(tuple(span.action for span in spans) for spans in self.ranks))


def pieces_of(actions: Sequence[Action]) -> list[list[Action]]:
    """Return single actions, and pairs, which begin together."""
    pieces: list[list[Action]] = [[]]
    for action in actions:
        pieces[-1].append(action)
        if not action.paired:
            pieces.append([])
    return [piece for piece in pieces if piece]


def needs(action: Action, last: int) -> list[Result]:
    """Return the results that an action begins with, of stages up to the ``last``."""
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
    """Offer every rank's next piece to ``run``, which returns whether it ran; stop when none runs, return the rest."""
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
    """Return, per stage, the most microbatches between their forward and their weight gradients."""
    every = [action for actions in order for action in actions]
    stages = range(1 + max((action.stage for action in every), default=-1))
    return fullest_live(
        tuple(tuple(a for a in every if a.stage == stage) for stage in stages), [1] * len(stages)
    )


def fullest_live(order: Order, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return, per stage, the microbatches in flight when its rank's stages, weighted by their ``sizes``, hold most."""
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
    """Return the rank of each stage."""
    return {action.stage: rank for rank, actions in enumerate(order) for action in actions}


def _busy(spans: tuple[Span, ...], begin: float, end: float) -> float:
    return sum(
        max(
            0.0,
            min(span.end, end) - max(span.start, begin),
        )
        for span in spans
    )
