"""Hold the plan of one parameter under a layout: its cuts, and the reductions of its gradient between the backward pass
and the optimizer.

::

    kind              which ranks                                             reduction
    sum               ranks of ``axis`` hold the same parameter, each with    all-reduce over ``axis``
                      a partial gradient (from its heads or tokens)
    sum-stages        pipeline ``stages`` hold one tied tensor, each with     all-reduce over their ranks
                      the gradient of its own use
    sum-replicas      ``replicas`` consecutive ranks of ``axis`` hold the     all-reduce over these ranks
                      same heads, each with the gradient of its queries
    reduce-scatter    ranks of ``axis`` have different batches and shards     reduce-scatter over ``axis``
    all-reduce        ranks of ``axis`` have different batches                all-reduce over ``axis``
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from ..config.parallel import ParallelConfig
from .cut import Cut, cut_shape, narrow_spans

Kind = Literal["sum", "sum-stages", "sum-replicas", "reduce-scatter", "all-reduce"]
MODEL_AXES = ("ep", "tp")  # the axes whose cuts change the shapes of a model's parameters


@dataclass(frozen=True)
class Reduction:
    """Describe one reduction of a gradient. Its ``str`` is the text in the printed plan."""

    kind: Kind  # see the table in the module's docstring
    axis: str  # the mesh axis whose ranks take part
    stages: tuple[int, ...] = ()  # for ``sum-stages``, the pipeline stages
    replicas: int = 1  # for ``sum-replicas``, how many consecutive ranks take part

    def __str__(self) -> str:
        words = {
            "sum-stages": f"sum over stages {', '.join(map(str, self.stages))}",
            "sum-replicas": f"sum over the {self.replicas} ranks with the same heads",
        }
        return words.get(self.kind, f"{self.kind} over {self.axis}")


def data_axes(spread: bool) -> tuple[str, str]:
    """Return the replicating and the sharding data axis of a parameter. ``spread``: the parameter belongs to experts
    that are sharded over the expert axis, so it has fewer data ranks.
    """
    return ("edp_replicate", "edp_shard") if spread else ("dp_replicate", "dp_shard")


def reductions_of(
    layout: ParallelConfig,
    cuts: Sequence[Cut],
    partial: Sequence[str] = (),
    stages: Sequence[int] = (),
) -> tuple[Reduction, ...]:
    """Return all reductions of a parameter's gradient, in order.

    Args:
        cuts: the parameter's cuts.
        partial: the axes over which the parameter's gradient is partial.
        stages: the pipeline stages that hold the parameter, if several stages hold it as a tied tensor.
    """

    def steps() -> Iterator[Reduction]:
        for axis in partial:
            yield Reduction("sum", axis)
        if stages:
            yield Reduction("sum-stages", "pp", stages=tuple(stages))
        for cut in cuts:
            for replicas in sorted({count for count in cut.replicas if count > 1}):
                yield Reduction("sum-replicas", cut.axis, replicas=replicas)
        over = {cut.axis for cut in cuts}
        replicate, shard = data_axes(spread="ep" in over)
        if shard in over:
            yield Reduction("reduce-scatter", shard)
        if layout.size(replicate) > 1:
            yield Reduction("all-reduce", replicate)

    return tuple(steps())


def data_cut(layout: ParallelConfig, spread: bool = False, dim: int = 0) -> list[Cut]:
    """Return the cut of a parameter over the sharding data axis in a list; an empty list if the axis has one rank."""
    _, axis = data_axes(spread)
    size = layout.size(axis)
    return [Cut(axis, dim, size)] if size > 1 else []


def join_path(block: str, child: str) -> str:
    """Return the name of ``child`` inside ``block``; the empty child is the block itself."""
    return f"{block}.{child}" if child else block


@dataclass(frozen=True)
class ParameterPlan:
    """Hold the plan of one parameter: its stage, its cuts, and the reductions of its gradient."""

    name: str  # name in the stock model
    shape: tuple[int, ...]  # global shape
    dtype: torch.dtype
    stage: int = 0  # the pipeline stage that holds the parameter; the first one if several do
    # the cuts, in order: expert and tensor axes first, then the sharding data axis
    cuts: tuple[Cut, ...] = ()
    # reductions of the gradient before the optimizer's step, in order
    reductions: tuple[Reduction, ...] = ()
    tied_to: str | None = None  # the name of another parameter that is the same tensor

    def local_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Return the parameter's shape on the rank at coordinates ``ranks`` (axis -> rank)."""
        return cut_shape(self.shape, self.cuts, ranks)

    @cached_property
    def partial(self) -> tuple[str, ...]:
        """The axes over which each rank holds a partial gradient, which must be summed."""
        return tuple(step.axis for step in self.reductions if step.kind == "sum")

    @property
    def replicas(self) -> int:
        """The number of consecutive ranks that hold the same shard; with several parts, the largest such number."""
        return max((cut.most_replicas for cut in self.cuts), default=1)

    def counted(self, ranks: dict[str, int]) -> tuple[int, list[tuple[int, int]]] | None:
        """Return the entries of its local shard that the rank at ``ranks`` counts, so that each entry is counted once.

        A rank counts the entries that no lower rank holds too.

        The result is a dim and spans ``(start, stop)`` along this dim, or ``None`` if the rank counts all its entries.
        """
        replicated = next(
            (index for index, cut in enumerate(self.cuts) if cut.most_replicas > 1), None
        )
        if replicated is None:
            return None
        cut = self.cuts[replicated]
        rank = ranks.get(cut.axis, 0)
        length = cut_shape(self.shape, self.cuts[:replicated], ranks)[cut.dim]
        spans = cut.local_spans(length, rank, lambda replicas: rank % replicas == 0)
        length = cut.local_length(length, rank)
        for later in self.cuts[replicated + 1 :]:
            if later.dim == cut.dim:
                rank = ranks.get(later.axis, 0)
                spans = narrow_spans(spans, later.spans(length, rank))
                length = later.local_length(length, rank)
        return None if sum(stop - start for start, stop in spans) == length else (cut.dim, spans)

    @property
    def model_cuts(self) -> tuple[Cut, ...]:
        """The cuts over the expert and tensor axes, which change the parameter's shape in the model."""
        return tuple(cut for cut in self.cuts if cut.axis in MODEL_AXES)

    @property
    def data_cuts(self) -> tuple[Cut, ...]:
        """The cuts over the data axes, which come after all other cuts."""
        return tuple(cut for cut in self.cuts if cut.axis not in MODEL_AXES)

    def model_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Return the parameter's shape in the model on the rank at ``ranks``: all cuts except those over data axes."""
        return cut_shape(self.shape, self.model_cuts, ranks)

    def cut_over(self, axis: str) -> Cut | None:
        """Return the parameter's cut over ``axis``; ``None`` if it has no such cut."""
        return next((cut for cut in self.cuts if cut.axis == axis), None)

    def take(
        self,
        tensor: torch.Tensor,
        ranks: dict[str, int],
        axes: tuple[str, ...] | None = None,
    ) -> torch.Tensor:
        """Return the shard of a full tensor on the rank at ``ranks``, by all cuts, or only by the cuts over
        ``axes``.
        """
        for cut in self.cuts:
            if axes is None or cut.axis in axes:
                tensor = cut.take(tensor, ranks.get(cut.axis, 0))
        return tensor
