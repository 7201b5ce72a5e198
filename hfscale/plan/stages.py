"""Define the plan of pipeline stages: the layers, the rank and the cost of each stage. Balance layers over stages.

:mod:`hfscale.parallel.pipeline.stage_plan` measures the cost of a layer, and finds the modules around the layers.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..config.schedules import schedule_of
from ..errors import ConfigError

_COLUMNS = ("stage", "rank", "layers", "of the model", "parameters", "of FLOPs", "of the mean")


@dataclass(frozen=True)
class Loan:
    """Describe a module that only the first layer of a layer list holds, although all layers use its result. An example
    is T5's table of relative positions (Raffel et al. 2020): the first layer computes a bias from it, which the
    attention of every layer adds.

    The result is not sent between pipeline stages, since it is as large as the attention scores. Instead, every stage
    with layers of the list holds the module as a tied tensor, and the stage's first layer computes the result itself.
    """

    layer_list: str  # name of the list
    owner: str  # path, within a layer, of the module that holds the lent module
    child: str  # attribute of the owner that is the lent module
    # attributes of the owner that tell the stock code that the module is present, with their values in the first layer
    flags: tuple[tuple[str, bool], ...] = ()

    @property
    def lender(self) -> str:
        """The name of the layer that holds the module in the stock model: the first layer of the list."""
        return f"{self.layer_list}.0"

    @property
    def name(self) -> str:
        """The full name of the module in the model, including the name of the layer that holds it."""
        return ".".join(filter(None, (self.lender, self.owner, self.child)))


def balance(
    work: Sequence[int],
    stages: int,
    first: int = 0,
    last: int = 0,
) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage, at least 1, such that the cost of the costliest stage is
    minimal.

    The speed of a pipeline is that of its slowest stage (Huang et al. 2019, GPipe; Narayanan et al. 2019, PipeDream),
    so only the costliest stage matters. Of several optima, the one with the most even numbers of layers is returned. If
    several remain, the one with the fewest layers in the first stages is returned, because a schedule keeps the
    activations of most microbatches on these stages.

    Args:
        work: the cost of each layer, in any unit.
        stages: the number of stages.
        first: additional cost of the first stage (the embedding), in the same unit.
        last: additional cost of the last stage (norm and head), in the same unit.
    """
    layers = len(work)
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers cannot be shared out to {stages} stages: use at least one stage, and at most one per "
            "layer"
        )
    total = list(accumulate(work, initial=0))

    def size(stage: int, start: int, stop: int) -> int:
        return total[stop] - total[start] + first * (stage == 0) + last * (stage == stages - 1)

    # Both tables are filled from the last stage to the first; their rows are indexed by a stage's first layer.
    # The latest possible end of each stage, the last stage first
    ends = range(layers, layers - stages, -1)
    least: dict[int, int] = {layers: 0}
    for stage, end in zip(reversed(range(stages)), ends, strict=True):
        # A longer stage costs more and leaves less for other stages, so the maximum is minimal where the costs cross.
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
    # Second pass, over the partitions within the bound: minimize squares of the counts, then the counts themselves.
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

    ``pp_size`` is ``p`` and ``virtual_stages`` is ``v``, the number of stages per rank::

        looped schedules,   p = 2, v = 2     stages 0 1 2 3  ->  ranks 0 1 0 1      (Narayanan et al. 2021, PTD-P)
        V-shaped schedules, p = 2, v = 2     stages 0 1 2 3  ->  ranks 0 1 1 0      (zbv, dualpipev)
    """
    if schedule.endswith(".csv"):
        raise ConfigError(
            f"pipeline_schedule={schedule!r} is a file that assigns stages to ranks: pass ranks=, the rank of each "
            "stage in the file"
        )
    if not schedule_of(schedule).v_shaped:
        return tuple(stage % pp_size for stage in range(pp_size * virtual_stages))
    if virtual_stages != 2:
        raise ConfigError(
            f"virtual_stages={virtual_stages} does not fit {schedule}: use 2 (stages are placed on ascending ranks, "
            "then on descending ranks)"
        )
    return (*range(pp_size), *reversed(range(pp_size)))


@dataclass(frozen=True)
class Stage:
    """Describe one pipeline stage: consecutive layers of a model."""

    index: int  # number of the stage, counted along the model over all ranks
    rank: int  # the pipeline rank that holds the stage
    layers: tuple[str, ...]  # names of the stage's layers, in order
    # names of further modules of the stage (embedding, norm, head), and of parameters outside such modules
    modules: tuple[str, ...]
    parameters: int  # number of entries of all parameters; a tied tensor counts once
    flops: int  # FLOPs of the stage's forward pass, per token

    def is_local(self, name: str) -> bool:
        """Return whether the parameter or module ``name`` belongs to this stage. Return ``False`` for modules without
        parameters that every stage runs, such as rotary embeddings.
        """
        return any(
            name == owned or name.startswith(f"{owned}.") for owned in (*self.layers, *self.modules)
        )


@dataclass(frozen=True)
class Tie:
    """Describe a tensor that several pipeline stages hold: an embedding that is tied to the head, or a tensor that all
    layers read. Its gradient is summed over ``stages``. Norms, memory estimates and checkpoints include it once, on
    stage ``owner``.
    """

    names: tuple[str, ...]  # all names of the tensor, in the model's order
    stages: tuple[int, ...]  # the stages that hold the tensor, ascending

    @property
    def owner(self) -> int:
        """The stage that includes the tensor in norms and saves it: the first stage that holds it."""
        return self.stages[0]


@dataclass(frozen=True)
class TwoStacks:
    """Describe an encoder and a decoder that are divided into stages as one list of layers, the encoder's layers first.

    ::

        stages of the encoder      ids --> encoder's hidden states, [b, s, h] -->
        stages of the decoder      target ids --> decoder's hidden states and encoder's output, [b, t + s, h] -->

    Every stage of the decoder sends the encoder's output to the next stage, so that the gradients of all layers that
    read the output are summed on the way back.
    """

    encoder: str  # name of the encoder module
    decoder: str  # name of the decoder module
    first: str  # name of the decoder's first layer


@dataclass(frozen=True)
class StagePlan:
    """Describe the pipeline stages of a model; ``print`` it for a table of stages and their costs.

    On each stage, the modules of other stages are replaced by empty modules, and the rest of the stock model runs
    unchanged, including modules without parameters, which every stage has. Stages exchange only hidden states: what a
    stage receives replaces the input of its first layer, and what it sends is the output of its last layer.
    """

    stages: tuple[Stage, ...]  # all stages, in the order of the model
    # modules without parameters outside the layers (rotary embeddings, dropout), which are on every stage
    everywhere: tuple[str, ...]
    owner: str  # the module that calls the layers; the empty string is the model itself
    layer_list: str  # name of the list that contains the layers
    # form of a layer's output, which stand-ins return too: ``None`` for a tensor (the hidden states), ``n`` for a tuple
    # of ``n`` entries whose first is the hidden states
    returns: int | None
    # form of the output of each called module in :attr:`Stage.modules`, and of each layer of an encoder, like
    # ``returns``; 0 for any other form
    module_returns: tuple[tuple[str, int | None], ...]
    ties: tuple[Tie, ...]  # tensors that several stages hold
    # the cost of each stage, in the unit of :meth:`hfscale.parallel.pipeline.stage_costs.Cost.work`
    work: tuple[int, ...]
    # the encoder and the decoder; ``None`` for a model with one list of layers
    stacks: TwoStacks | None = None
    # modules of the first layer of a list that every stage with layers of the list holds
    loans: tuple[Loan, ...] = ()

    @property
    def places(self) -> dict[str, int]:
        """The index of each layer in the model, by the layer's name."""
        return {
            name: number
            for number, name in enumerate(name for stage in self.stages for name in stage.layers)
        }

    def arrives(self, stage: int) -> tuple[bool, bool]:
        """Return whether a stage of an encoder-decoder model receives the encoder's hidden states, and whether it
        receives the decoder's hidden states together with the encoder's output.

        The first is true if the stage's first layer is before the decoder's first layer, the second if it is after.
        Without a decoder, the result is ``(True, False)``.
        """
        if self.stacks is None:
            return True, False
        start = self.places[self.stages[stage].layers[0]]
        border = self.places[self.stacks.first]
        return start < border, start > border

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return tuple(stage.rank for stage in self.stages)

    @property
    def imbalance(self) -> float:
        """The cost of the costliest stage divided by the mean cost of a stage: 1.0 if all stages are equal. A step
        takes this many times as long as with equal stages.
        """
        return max(self.work) * len(self.work) / max(1, sum(self.work))

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """Return the pipeline stages that ``rank`` holds, in the order of the model."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def stage_of(self, name: str) -> int:
        """Return the index of the stage that holds the parameter or module ``name``; the lowest index if several stages
        hold it.
        """
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
        from .columns import aligned

        lines = aligned([_COLUMNS, *rows], left=[_COLUMNS.index("of the model")])
        return "\n".join([*lines, f"largest stage / mean: {self.imbalance:.2f}", *tied])


def _extent(stage: Stage) -> str:
    """Return a stage's modules and range of layers as a text: ``model.embed_tokens, model.layers.0-4``."""
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
