"""Plan the data axes: shards of parameters, and what FSDP2 cannot hold."""

from ..config import ParallelConfig
from ..plan.cut import Cut
from ..plan.parameter import wild_name
from ..plan.reductions import data_axes
from .draft import Draft


def plan_data(draft: Draft) -> None:
    """Note the parameters that cannot be shared out to data ranks."""
    for name, parameter in draft.named() if draft.layout.data_world > 1 else ():
        if parameter.ndim == 0:
            draft.problem(
                f"{draft.layout.describe()}: {wild_name(name)} is a scalar, which FSDP2 cannot hold: use "
                "dp_shard_size=1 and dp_replicate_size=1"
            )


def data_cut(layout: ParallelConfig, spread: bool = False, dim: int = 0) -> list[Cut]:
    """The shards of a parameter that is ``spread`` over the expert axis, or not; none where nothing is sharded."""
    _, axis = data_axes(spread)
    size = layout.size(axis)
    return [Cut(axis, dim, size)] if size > 1 else []
