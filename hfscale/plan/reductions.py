"""Plan the reductions of a gradient between the backward pass and the optimizer.

::

    kind              which ranks                                             reduction
    sum               ranks of ``axis`` hold the same parameter, each with    all-reduce over ``axis``
                      a partial gradient (of its heads, its tokens)
    sum-stages        pipeline ``stages`` hold one tied tensor, each with     all-reduce over their ranks
                      the gradient of its own use
    sum-replicas      ``replicas`` consecutive ranks of ``axis`` hold the     all-reduce over those ranks
                      same heads, each with the gradient of its queries
    reduce-scatter    ranks of ``axis`` have batches and shards of their own  reduce-scatter over ``axis``
    all-reduce        ranks of ``axis`` have batches of their own             all-reduce over ``axis``
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..config.parallel import ParallelConfig
from .cut import Cut

Kind = Literal["sum", "sum-stages", "sum-replicas", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True)
class Reduction:
    """Describe one reduction of a gradient; ``str`` of it is its text in the printed plan."""

    kind: Kind  # see the module's table
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
    """Return the replicating and the sharding data axis of a parameter, ``spread`` over the expert axis or not."""
    return ("edp_replicate", "edp_shard") if spread else ("dp_replicate", "dp_shard")


def reductions_of(
    layout: ParallelConfig, cuts: Sequence[Cut], partial: Sequence[str] = (), stages: Sequence[int] = ()
) -> tuple[Reduction, ...]:
    """Return all reductions of a parameter's gradient, in order; ``stages`` hold it, if it is tied over several."""

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
    """Return the cut of a parameter over the sharding data axis; none if that has one rank."""
    _, axis = data_axes(spread)
    size = layout.size(axis)
    return [Cut(axis, dim, size)] if size > 1 else []
