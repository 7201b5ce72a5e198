"""What compressed gradients keep from one step to the next."""

from collections.abc import Iterable
from math import prod

from ...plan.cut import cut_shape
from ...plan.parameter import ParameterPlan
from ...plan.plan import Plan

_DATA = ("dp_shard", "edp_shard")


def left_out_bytes(plan: Plan, training: Iterable[ParameterPlan], ranks: dict[str, int], mixed: bool) -> int:
    """What PowerSGD has left out of this rank's gradients so far, in 32 bits at least, and its factors."""
    if plan.layout.gradient_compression != "powersgd":
        return 0
    total, rank = 0, int(plan.layout.powersgd_rank or 1)
    here = {axis: number for axis, number in ranks.items() if axis not in _DATA}  # data ranks' shards are padded
    for planned in training:
        spread = any(cut.axis == "ep" for cut in planned.cuts)
        size = cut_shape(planned.shape, planned.cuts, here)
        rows, columns = (size[0], prod(size[1:])) if len(size) > 1 else (1, 1)
        worth = rank * (rows + columns) < rows * columns and rank <= min(rows, columns)
        if worth and plan.layout.size("edp_replicate" if spread else "dp_replicate") > 1:
            wide = 4 if mixed else max(4, planned.dtype.itemsize)
            total += wide * (rows * columns + rank * columns)
    return total
