"""Model FLOPs utilization: how much of what devices could multiply goes into the model (Chowdhery et al. 2022, PaLM).

Of one token, in products and sums: ``2`` per weight of the matrices it meets, and ``4 x width x tokens`` per layer for
the attention of a sequence; once forward and twice backward, or once where weights are frozen under adapters. What is
recomputed does not count.
"""

from typing import Any

from .._compat.torch_device import accelerators
from ..cost.model.machines_known import find_machine, machine_names
from ..cost.model.model_shape import shape_of
from ..errors import ConfigError
from .schema import FinetuneRecipe, Recipe


def utilization(config: Any, recipe: Recipe, devices: int, tokens_per_second: float) -> dict[str, float]:
    """Return ``mfu``, a share of what so many devices could do at most, where it is known."""
    adapted = isinstance(recipe, FinetuneRecipe) and bool(recipe.adapter)
    told = recipe.training.peak_tflops
    peak = devices * (peak_flops() if told is None else 1e12 * told)
    try:
        needed = flops_per_token(config, recipe.data.sequence_length, adapted)
    except ConfigError:  # of no decoder with layers of one kind
        return {}
    return {"mfu": round(tokens_per_second * needed / peak, 4)} if peak else {}


def flops_per_token(config: Any, sequence_length: int, adapted: bool) -> float:
    """Products and sums that training needs for one token.

    Args:
        adapted: whether weights stay as they are, under adapters.

    Raises:
        ConfigError: the config names no layers, width or heads.
    """
    shape = shape_of(config)
    weights = shape.layers * shape.active_weights + shape.table_weights
    forward = 2 * weights + 4 * shape.layers * shape.queries * sequence_length
    return forward * (2.0 if adapted else 3.0)


def peak_flops() -> float:
    """Dense products and sums in 16 bits per second of this process's device; 0 where it is not known."""
    if not accelerators().is_available():
        return 0.0
    name = accelerators().get_device_name().lower()
    fitting = [machine for machine in machine_names() if machine.partition("-")[0] in name]
    return find_machine(fitting[0]).flops if fitting else 0.0
