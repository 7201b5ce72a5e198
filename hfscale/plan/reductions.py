"""What happens to a gradient between the backward pass and the optimizer: decided once, printed and executed from it.

::

    kind              who holds what                                          what is done
    sum               ranks of ``axis`` see a part each (their heads, their   all-reduce over ``axis``
                      tokens) of the gradient of what all of them hold
    sum-stages        pipeline ``stages`` hold one tied tensor, and see the   all-reduce over their ranks
                      gradient of their own use each
    sum-replicas      ``replicas`` consecutive ranks of ``axis`` hold the     all-reduce over those ranks
                      same heads, and see the gradient of their queries
    reduce-scatter    ranks of ``axis`` have batches and shards of their own  reduce-scatter over ``axis``
    all-reduce        ranks of ``axis`` have batches of their own             all-reduce over ``axis``
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..config import ParallelConfig
from .cut import Cut

Kind = Literal["sum", "sum-stages", "sum-replicas", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True)
class Reduction:
    """One step on the way of a gradient; ``str`` of it is what the printed plan says.

    Attributes:
        kind: see the module's table.
        axis: the mesh axis whose ranks take part.
        stages: the pipeline stages, of ``sum-stages``.
        replicas: how many consecutive ranks take part, of ``sum-replicas``.
    """

    kind: Kind
    axis: str
    stages: tuple[int, ...] = ()
    replicas: int = 1

    def __str__(self) -> str:
        match self.kind:
            case "sum":
                return f"sum over {self.axis}"
            case "sum-stages":
                return f"sum over stages {', '.join(map(str, self.stages))}"
            case "sum-replicas":
                return f"sum over the {self.replicas} ranks with the same heads"
            case _:
                return f"{self.kind} over {self.axis}"


def data_axes(spread: bool) -> tuple[str, str]:
    """The replicating and the sharding data axis of a parameter, ``spread`` over the expert axis or not."""
    return ("edp_replicate", "edp_shard") if spread else ("dp_replicate", "dp_shard")


def reductions_of(
    layout: ParallelConfig, cuts: Sequence[Cut], partial: Sequence[str] = (), stages: Sequence[int] = ()
) -> tuple[Reduction, ...]:
    """Every step, in order.

    Args:
        cuts: how the parameter is cut.
        partial: axes whose ranks see a part of its gradient each.
        stages: the pipeline stages that hold it, where it is tied over several.
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
