"""Pipeline stages as data: how layers are shared out, which rank holds which stage, and what each stage costs.

Integers in, integers out; what a layer costs is measured in :mod:`hfscale.planner.costs`, and which modules come before
and after the layers is found in :mod:`hfscale.planner.assign`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .loans import Loan

V_SCHEDULES = ("zbv", "dualpipev")
"""Schedules whose stages go down the ranks and up again (Qi et al. 2023; DeepSeek 2025)."""

_COLUMNS = ("stage", "rank", "layers", "of the model", "parameters", "of FLOPs", "of the mean")


def balance(work: Sequence[int], stages: int, first: int = 0, last: int = 0) -> tuple[int, ...]:
    """Share consecutive layers out to ``stages`` so that the largest stage is as small as it can be.

    A pipeline advances at the pace of its slowest stage (Huang et al. 2019, GPipe; Narayanan et al. 2019, PipeDream),
    so the largest is what counts. Of all optima, that with the most even numbers of layers is taken, and of those the
    one with fewer layers in front, where a schedule keeps the activations of most microbatches.

    Args:
        work: what each layer costs, in any unit.
        stages: stages over all ranks.
        first: what the first stage has besides layers (the embedding).
        last: what the last stage has besides (the final norm and the head).

    Returns:
        the number of layers of each stage, each at least 1.

    Raises:
        ValueError: fewer layers than stages.
    """
    layers = len(work)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be shared out to {stages} stages")
    total = [0]
    for cost in work:
        total.append(total[-1] + cost)

    def size(stage: int, start: int, stop: int) -> int:
        return total[stop] - total[start] + first * (stage == 0) + last * (stage == stages - 1)

    # Both tables are filled from the last stage forwards; their rows are indexed by a stage's first layer.
    ends = range(layers, layers - stages, -1)  # where each stage must stop at the latest, from the last stage on
    least: dict[int, int] = {layers: 0}
    for stage, end in zip(reversed(range(stages)), ends, strict=True):
        # A longer stage is larger and what it leaves is not: the least of both is where the one overtakes the other.
        rest, row = least, dict[int, int]()
        for start in range(stage, end):
            stops = range(max(start + 1, min(rest)), end + 1)
            over = bisect_left(stops, True, key=lambda stop: size(stage, start, stop) >= rest[stop])
            row[start] = min(max(size(stage, start, stop), rest[stop]) for stop in stops[max(0, over - 1) : over + 1])
        least = row
    bound = least[0]
    # The same once more, over the partitions within the bound: squares of the counts, then the counts themselves.
    best: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for stage in reversed(range(stages)):
        rows, best = best, {}
        for start in range(stage, layers):
            furthest = bisect_right(total, bound + total[start] - size(stage, start, start))
            stops = range(start + 1, furthest)
            options = [(rows[s][0] + (s - start) ** 2, (s - start, *rows[s][1])) for s in stops if s in rows]
            if options:
                best[start] = min(options)
    return best[0][1]


def place_stages(schedule: str, pp_size: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """The pipeline rank of each stage.

    ::

        loop, p = 2, v = 2      stages 0 1 2 3  ->  ranks 0 1 0 1      (Narayanan et al. 2021, PTD-P)
        V,    p = 2             stages 0 1 2 3  ->  ranks 0 1 1 0      (zbv, dualpipev)

    Raises:
        ConfigError: a V without two stages per rank, or a file, whose own placement only its reader knows.
    """
    if schedule.endswith(".csv"):
        raise ConfigError(
            f"pipeline_schedule={schedule!r}: the file says which rank holds which stage: pass that as ranks="
        )
    if schedule not in V_SCHEDULES:
        return tuple(stage % pp_size for stage in range(pp_size * virtual_stages))
    if virtual_stages != 2:
        raise ConfigError(
            f"virtual_stages={virtual_stages} does not fit {schedule}: use 2 (the model goes down the ranks and up "
            "again)"
        )
    return (*range(pp_size), *reversed(range(pp_size)))


@dataclass(frozen=True)
class Stage:
    """One consecutive part of a model.

    Attributes:
        index: its number, counted along the model over all ranks.
        rank: the pipeline rank that holds it.
        layers: names of its layers, in order.
        modules: names of the other modules, and of parameters that no smaller module owns, that it holds.
        parameters: how many numbers it holds, a tied tensor once.
        flops: FLOPs of its forward pass, per token.
    """

    index: int
    rank: int
    layers: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: int
    flops: int

    def is_local(self, name: str) -> bool:
        """Whether a parameter or module is this stage's (those that every stage has are nobody's)."""
        return any(name == owned or name.startswith(f"{owned}.") for owned in (*self.layers, *self.modules))


@dataclass(frozen=True)
class Tie:
    """One tensor that several stages hold a copy of: an embedding and the head tied to it, or what all layers read.

    Its gradient is the sum over ``stages``; it counts once in a norm, in memory of the model, and in a checkpoint: at
    ``owner``.

    Attributes:
        names: all its names, the model's first one first.
        stages: who holds it, ascending.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The stage that counts and saves it."""
        return self.stages[0]


@dataclass(frozen=True)
class TwoStacks:
    """An encoder and a decoder that are cut as one list of layers, the encoder's first.

    ::

        stages of the encoder      ids --> its stream, [b, s, h] -->
        stages of the decoder      target ids --> its stream and behind it what the encoder made, [b, t + s, h] -->

    Every stage of the decoder passes on what the encoder made, so that the gradients of all that read it add up on
    their way back.

    Attributes:
        encoder, decoder: names of the modules.
        first: name of the decoder's first layer.
    """

    encoder: str
    decoder: str
    first: str


@dataclass(frozen=True)
class StagePlan:
    """A model cut into pipeline stages. ``print`` it for what each stage costs.

    Between stages travels the stream alone: what the last layer of a stage returns is what the first layer of the next
    one gets. A stage is the stock model with stand-ins for what it does not hold; as modules without parameters, and
    whatever else the stock code computes around the layers, still run on it, the stream must be taken where its last
    layer returns it, and put in where its first layer is called.

    Attributes:
        stages: all stages, in the order of the model.
        everywhere: modules without parameters that are outside of the layers (rotary tables, dropouts): on every stage.
        owner: the module that calls the layers; the empty string is the model itself.
        layer_list: name of the list that the layers are in.
        returns: what a layer returns: ``None`` for a tensor, the stream; ``n`` for a tuple of ``n`` with the stream
            first. A stand-in for an absent layer must return the same.
        module_returns: the same of each module in :attr:`Stage.modules`, where it was called, and of each layer of an
            encoder; 0 for anything else.
        ties: tensors that several stages hold.
        work: what each stage costs, in the unit of :meth:`hfscale.planner.costs.Cost.work`.
        stacks: of an encoder-decoder, its two; ``None`` where there is one list of layers.
        loans: modules of first layers that every stage with layers of their list holds.
    """

    stages: tuple[Stage, ...]
    everywhere: tuple[str, ...]
    owner: str
    layer_list: str
    returns: int | None
    module_returns: tuple[tuple[str, int | None], ...]
    ties: tuple[Tie, ...]
    work: tuple[int, ...]
    stacks: TwoStacks | None = None
    loans: tuple[Loan, ...] = ()

    @property
    def places(self) -> dict[str, int]:
        """Name of each layer -> its number, counted along the model."""
        return {name: number for number, name in enumerate(name for stage in self.stages for name in stage.layers)}

    def arrives(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage is in front of, and whether it is behind, the first layer of a decoder.

        What arrives in front is a stream of the source's tokens, as at a decoder's very first layer; behind it, that of
        the target's and what the encoder made of the source.
        """
        if self.stacks is None:
            return True, False
        start, border = self.places[self.stages[stage].layers[0]], self.places[self.stacks.first]
        return start < border, start > border

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(stage.rank for stage in self.stages)

    @property
    def imbalance(self) -> float:
        """The largest stage over the mean stage: 1.0 is perfect, and every step takes that many times the ideal."""
        return max(self.work) * len(self.work) / max(1, sum(self.work))

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """The stages of one rank, in the order of the model."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def stage_of(self, name: str) -> int:
        """The stage of a parameter or module; of one that two stages hold, the first.

        Raises:
            KeyError: no stage holds it.
        """
        for stage in self.stages:
            if stage.is_local(name):
                return stage.index
        raise KeyError(name)

    def __str__(self) -> str:
        flops, mean = max(1, sum(stage.flops for stage in self.stages)), sum(self.work) / len(self.work)
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
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]

        def line(cells: Sequence[str]) -> str:
            aligned = [
                cell.ljust(width) if column == "of the model" else cell.rjust(width)
                for cell, width, column in zip(cells, widths, _COLUMNS, strict=True)
            ]
            return "  ".join(aligned).rstrip()

        tied = [
            f"tied: {' = '.join(tie.names)} on stages {', '.join(map(str, tie.stages))}, counted and saved by "
            f"stage {tie.owner}"
            for tie in self.ties
        ]
        return "\n".join([line(_COLUMNS), *map(line, rows), f"largest stage / mean: {self.imbalance:.2f}", *tied])


def _extent(stage: Stage) -> str:
    """``model.embed_tokens, model.layers.0-4``."""
    lists: dict[str, list[str]] = {}
    for layer in stage.layers:
        path, _, number = layer.rpartition(".")
        lists.setdefault(path, []).append(number)
    extents = (f"{path}.{own[0]}" + (f"-{own[-1]}" if len(own) > 1 else "") for path, own in lists.items())
    layers = ", ".join(extents)
    named = [layers, *stage.modules] if stage.index else [*stage.modules, layers]
    return ", ".join(named)
