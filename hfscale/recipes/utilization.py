"""Compute model FLOPs utilization: the model's FLOPs as a fraction of the devices' peak (Chowdhery et al. 2022, PaLM).

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
    """Return ``mfu``, a fraction of the devices' peak, if that is known."""
    adapted = isinstance(recipe, FinetuneRecipe) and bool(recipe.adapter)
    told = recipe.training.peak_tflops
    peak = devices * (peak_flops() if told is None else 1e12 * told)
    try:
        needed = flops_per_token(config, recipe.data.sequence_length, adapted)
    except ConfigError:  # of no decoder with layers of one kind
        return {}
    return {"mfu": round(tokens_per_second * needed / peak, 4)} if peak else {}


def flops_per_token(config: Any, sequence_length: int, adapted: bool) -> float:
    """Return the FLOPs that training needs per token; ``adapted``: whether weights stay as they are, under adapters."""
    shape = shape_of(config)
    weights = shape.layers * shape.active_weights + shape.table_weights
    forward = 2 * weights + 4 * shape.layers * shape.queries * sequence_length
    return forward * (2.0 if adapted else 3.0)


def peak_flops() -> float:
    """Return the peak dense FLOPs per second of this process's device in 16 bits; 0 if unknown."""
    if not accelerators().is_available():
        return 0.0
    name = accelerators().get_device_name().lower()
    fitting = [machine for machine in machine_names() if machine.partition("-")[0] in name]
    return find_machine(fitting[0]).flops if fitting else 0.0
