"""Define pipeline stages as data: the layers, the rank and the cost of each stage.

Integers in, integers out. :mod:`hfscale.parallel.pipeline.plan` measures the cost of a layer, and finds the modules
before and behind the layers.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..config.schedules import schedule_of
from ..errors import ConfigError
from .columns import aligned

_COLUMNS = ("stage", "rank", "layers", "of the model", "parameters", "of FLOPs", "of the mean")


@dataclass(frozen=True)
class Loan:
    """Describe a module that only the first layer of a list has, while the others are passed its result: T5's table of
    relative positions (Raffel et al. 2020), whose bias every attention of a stack adds.

    The result is not sent between stages (it is as large as the attention scores). Every stage with layers of the list
    holds the module instead, as a tied tensor, and the first of these layers computes the result itself.
    """

    layer_list: str  # name of the list
    owner: str  # path, within a layer, of the module that holds it
    child: str  # its attribute there
    # attributes of the owner by which the stock code knows that the module is there, with their values then
    flags: tuple[tuple[str, bool], ...] = ()

    @property
    def lender(self) -> str:
        """The name of the layer that has the module."""
        return f"{self.layer_list}.0"

    @property
    def name(self) -> str:
        """The name of the module in the model."""
        return ".".join(filter(None, (self.lender, self.owner, self.child)))


def balance(
    work: Sequence[int],
    stages: int,
    first: int = 0,
    last: int = 0,
) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least 1, such that the largest stage is as small as possible.

    A pipeline advances at the pace of its slowest stage (Huang et al. 2019, GPipe; Narayanan et al. 2019, PipeDream),
    so the largest counts. Among optima, those with the most even numbers of layers are preferred, and among these the
    one with fewer layers in front, where a schedule keeps the activations of most microbatches. The ``work`` of each
    layer is in any unit, as are further costs of the ``first`` stage (the embedding) and the ``last`` (norm and head).
    """
    layers = len(work)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be shared out to {stages} stages")
    total = list(accumulate(work, initial=0))

    def size(stage: int, start: int, stop: int) -> int:
        return total[stop] - total[start] + first * (stage == 0) + last * (stage == stages - 1)

    # Both tables are filled from the last stage forwards; their rows are indexed by a stage's first layer.
    ends = range(layers, layers - stages, -1)  # the latest stop of each stage, the last stage first
    least: dict[int, int] = {layers: 0}
    for stage, end in zip(reversed(range(stages)), ends, strict=True):
        # A longer stage costs more and leaves less: the minimum of the maximum is where the first overtakes the second.
        rest, row = least, dict[int, int]()
        for start in range(stage, end):
            stops = range(max(start + 1, min(rest)), end + 1)
            over = bisect_left(
                stops,
                True,
                key=lambda stop: size(stage, start, stop) >= rest[stop],
            )
            row[start] = min(
                max(size(stage, start, stop), rest[stop])
                for stop in stops[max(0, over - 1) : over + 1]
            )
        least = row
    bound = least[0]
    # Again, over the partitions within the bound: minimize squares of the counts, then the counts themselves.
    best: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for stage in reversed(range(stages)):
        rows = best
        best = {}
        for start in range(stage, layers):
            furthest = bisect_right(total, bound + total[start] - size(stage, start, start))
            stops = range(start + 1, furthest)
            options = [
                (rows[s][0] + (s - start) ** 2, (s - start, *rows[s][1]))
                for s in stops
                if s in rows
            ]
            if options:
                best[start] = min(options)
    return best[0][1]


def place_stages(schedule: str, pp_size: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Return the pipeline rank of each stage.

    ::

        loop, p = 2, v = 2      stages 0 1 2 3  ->  ranks 0 1 0 1      (Narayanan et al. 2021, PTD-P)
        V,    p = 2             stages 0 1 2 3  ->  ranks 0 1 1 0      (zbv, dualpipev)
    """
    if schedule.endswith(".csv"):
        raise ConfigError(
            f"pipeline_schedule={schedule!r}: pass ranks=, the rank of each stage in the file"
        )
    if not schedule_of(schedule).v_shaped:
        return tuple(stage % pp_size for stage in range(pp_size * virtual_stages))
    if virtual_stages != 2:
        raise ConfigError(
            f"virtual_stages={virtual_stages} does not fit {schedule}: use 2 (the model goes down the ranks and up "
            "again)"
        )
    return (*range(pp_size), *reversed(range(pp_size)))


@dataclass(frozen=True)
class Stage:
    """Describe one stage: consecutive layers of a model."""

    index: int  # its number, counted along the model over all ranks
    rank: int  # the pipeline rank that holds it
    layers: tuple[str, ...]  # names of its layers, in order
    # Names of the other modules, and of parameters that no smaller module owns, that it holds.
    modules: tuple[str, ...]
    parameters: int  # how many numbers it holds, a tied tensor once
    flops: int  # FLOPs of its forward pass, per token

    def is_local(self, name: str) -> bool:
        """Return whether a parameter or module is on this stage; ``False`` for those that every stage has."""
        return any(
            name == owned or name.startswith(f"{owned}.") for owned in (*self.layers, *self.modules)
        )


@dataclass(frozen=True)
class Tie:
    """Describe a tensor that several stages hold (an embedding and a tied head, or one that all layers read): its
    gradient is summed over ``stages``, and it counts once in norms, memory and checkpoints: at ``owner``.
    """

    names: tuple[str, ...]  # all its names, the model's first one first
    stages: tuple[int, ...]  # the stages that hold it, ascending

    @property
    def owner(self) -> int:
        """The stage that counts and saves it."""
        return self.stages[0]


@dataclass(frozen=True)
class TwoStacks:
    """Describe an encoder and a decoder that are cut as one list of layers, the encoder's first.

    ::

        stages of the encoder      ids --> its hidden states, [b, s, h] -->
        stages of the decoder      target ids --> its hidden states, then the encoder's output, [b, t + s, h] -->

    Every stage of the decoder passes the encoder's output on, so that its readers' gradients add up on the way back.
    """

    encoder: str  # names of the modules
    decoder: str  # names of the modules
    first: str  # name of the decoder's first layer


@dataclass(frozen=True)
class StagePlan:
    """Plan of a model cut into pipeline stages. ``print`` it for the cost of each stage.

    Only the hidden states are sent between stages: the output of a stage's last layer is the input of the next stage's
    first. A stage is the stock model with placeholders for the modules of other stages. Modules without parameters, and
    other computation of the stock code around the layers, still run on it, so the hidden states are taken where its
    last layer returns them and inserted where its first layer is called.
    """

    stages: tuple[Stage, ...]  # all stages, in the order of the model
    # modules without parameters outside of the layers (rotary tables, dropouts), which are on every stage
    everywhere: tuple[str, ...]
    owner: str  # the module that calls the layers; the empty string is the model itself
    layer_list: str  # name of the list that the layers are in
    # what a layer returns: ``None`` for a tensor, the hidden states; ``n`` for a tuple of ``n`` with the hidden
    # states first. A placeholder for a layer returns the same
    returns: int | None
    # likewise for each module in :attr:`Stage.modules` that was called, and each layer of an encoder; 0 for anything
    # else
    module_returns: tuple[tuple[str, int | None], ...]
    ties: tuple[Tie, ...]  # tensors that several stages hold
    # The cost of each stage, in the unit of
    # :meth:`hfscale.parallel.pipeline.stage_costs.Cost.work`.
    work: tuple[int, ...]
    # The encoder and decoder, if there are two; ``None`` for one list of layers.
    stacks: TwoStacks | None = None
    loans: tuple[
        Loan, ...
    ] = ()  # modules of first layers that every stage with layers of their list holds

    @property
    def places(self) -> dict[str, int]:
        """The index of each layer name, counted along the model."""
        return {
            name: number
            for number, name in enumerate(name for stage in self.stages for name in stage.layers)
        }

    def arrives(self, stage: int) -> tuple[bool, bool]:
        """Return whether a stage begins before, and whether after, the decoder's first layer. One that begins after it
        receives the target's hidden states and the encoder's output; others the source's hidden states.
        """
        if self.stacks is None:
            return True, False
        start = self.places[self.stages[stage].layers[0]]
        border = self.places[self.stacks.first]
        return start < border, start > border

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(stage.rank for stage in self.stages)

    @property
    def imbalance(self) -> float:
        """The cost of the largest stage over the mean: 1.0 is perfect, and a step takes that many times the ideal."""
        return max(self.work) * len(self.work) / max(1, sum(self.work))

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages of one rank, in the order of the model."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def stage_of(self, name: str) -> int:
        """Return the stage of a parameter or module; if several hold it, the first."""
        for stage in self.stages:
            if stage.is_local(name):
                return stage.index
        raise KeyError(name)

    def __str__(self) -> str:
        flops = max(1, sum(stage.flops for stage in self.stages))
        mean = sum(self.work) / len(self.work)
        rows = [
            (
                str(stage.index),
                str(stage.rank),
                str(len(stage.layers)),
                _extent(stage),
                f"{stage.parameters:,}",
                f"{stage.flops / flops:.1%}",
                f"{work / max(mean, 1):.2f}",
            )
            for stage, work in zip(self.stages, self.work, strict=True)
        ]
        tied = [
            f"tied: {' = '.join(tie.names)} on stages {', '.join(map(str, tie.stages))}, counted and saved by "
            f"stage {tie.owner}"
            for tie in self.ties
        ]
        lines = aligned([_COLUMNS, *rows], left=[_COLUMNS.index("of the model")])
        return "\n".join([*lines, f"largest stage / mean: {self.imbalance:.2f}", *tied])


def _extent(stage: Stage) -> str:
    """Return the modules and the range of layers of a stage: ``model.embed_tokens, model.layers.0-4``."""
    lists: dict[str, list[str]] = {}
    for layer in stage.layers:
        path, _, number = layer.rpartition(".")
        lists.setdefault(path, []).append(number)
    extents = (
        f"{path}.{own[0]}" + (f"-{own[-1]}" if len(own) > 1 else "") for path, own in lists.items()
    )
    layers = ", ".join(extents)
    named = [layers, *stage.modules] if stage.index else [*stage.modules, layers]
    return ", ".join(named)
