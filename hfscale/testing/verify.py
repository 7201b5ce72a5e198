"""``hfscale verify``: train a tiny clone of a model in the asked layout and in one process, and compare.

What a user runs before renting a cluster: it needs no GPU and no weights, and takes less than a minute.
"""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from .. import plan
from ..config import AXES, ParallelConfig
from .clone import tiny_clone
from .parity import Case, Parity, measure_parity
from .pool import RankPool

TOLERANCE = 1e-10
MAX_RANKS = 8


def scale_down(layout: ParallelConfig) -> ParallelConfig:
    """The layout itself up to :data:`MAX_RANKS` ranks; beyond, two ranks on every axis that has more than one."""
    if layout.total_size <= MAX_RANKS:
        return layout
    sizes: dict[str, Any] = {f"{axis}_size": min(2, layout.size(axis)) for axis in AXES}
    return replace(layout, **sizes)


def verify(config: PreTrainedConfig, layout: ParallelConfig, **hf_kwargs: Any) -> tuple[ParallelConfig, Parity]:
    """Compare the layout (scaled down to what one machine can start) with one process, on a tiny clone of the model.

    Raises:
        PlanError: the layout does not fit the clone.
    """
    small = scale_down(layout)
    case = Case(tiny_clone(config, **_heads_that_fit(config, layout.size("tp"), small.size("tp"))))
    plan(case.config, small)  # refuse before any process is started
    if small.total_size == 1:
        return small, measure_parity(case, small, None)
    with RankPool(small.total_size) as pool:
        return small, measure_parity(case, small, pool)


def _heads_that_fit(config: PreTrainedConfig, asked: int, tensor: int) -> dict[str, int]:
    """Changes to a clone's four heads and two key/value heads so that ``tensor`` ranks can share them.

    A model with fewer key/value heads than the ``asked`` tensor ranks has a clone of which that is true as well.
    """
    fields = config.to_dict()
    if "num_key_value_heads" not in fields:
        return {}
    fewer = (fields["num_key_value_heads"] or asked) < asked
    if fewer and tensor > 1:
        return {"num_key_value_heads": tensor // 2 if tensor % 2 == 0 else 1, "num_attention_heads": 2 * tensor}
    return {"num_key_value_heads": tensor, "num_attention_heads": 2 * tensor} if tensor > 2 else {}


def render(config: PreTrainedConfig, asked: ParallelConfig, used: ParallelConfig, parity: Parity) -> str:
    """The comparison as a table."""
    rows = [
        ("loss", parity.loss, ""),
        ("worst gradient", parity.gradient, parity.worst_gradient),
        ("clipped norm", parity.norm, ""),
        ("worst weight after two steps", parity.weight, parity.worst_weight),
        ("saved checkpoint", parity.saved, ""),
    ]
    title = f"a tiny {config.model_type} in {used.describe()} against stock transformers in one process, float64, gloo"
    if used != asked:
        title += f"\n({asked.describe()} has {asked.total_size} ranks: two are started on every axis instead)"
    lines = [
        f"{name:30} {value:9.1e}  {'ok' if value <= TOLERANCE else 'DIFFERS'}  {where}" for name, value, where in rows
    ]
    verdict = "equal to rounding" if parity.worst() <= TOLERANCE else f"differs by more than {TOLERANCE:g}"
    return "\n".join([title, "", f"{'':30} {'relative':>9}", *(line.rstrip() for line in lines), "", verdict])
