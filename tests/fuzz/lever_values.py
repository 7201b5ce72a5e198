"""What is asked of each lever that rounds or scales numbers: pure. Draws of layouts and of resumed runs share it."""

from collections.abc import Callable
from random import Random
from typing import Any

WIDE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "ffn_dim": 48,
    "n_inner": 48,
}
"""Sizes that products in 8 bits take, for a config that has them."""
BY_CHANCE = ("sgd", "sgd", "adamw_torch", "adagrad", "rmsprop", "lion_32bit", "adamw_8bit")
"""Optimizers that step a copy of a weight, and can round it by chance."""


def float8(random: Random) -> dict[str, Any]:
    """Fields of a :class:`hfscale.Float8Config`."""
    asked: dict[str, Any] = {"recipe": random.choice(("tensorwise", "rowwise"))}
    if asked["recipe"] == "tensorwise" and random.random() < 0.3:
        asked["fp8_all_gather"] = False
    return asked


def loss_scaling(random: Random) -> dict[str, Any]:
    """A scale that no gradient overflows, or one that the first step's overflow in float16 whatever they are."""
    scales = random.choice(
        ({"init_scale": 2.0**8}, {"init_scale": 2.0**40, "backoff_factor": 2.0**-32})
    )
    return {**scales, "growth_interval": 1} if random.random() < 0.5 else dict(scales)


def compress_activations(random: Random) -> dict[str, Any]:
    """Fields of a :class:`hfscale.MemoryConfig`."""
    return {"compress_activations": random.choice(("1B", "256B", "1KiB"))}


def gradient_compression(random: Random) -> dict[str, Any]:
    """Fields of a :class:`hfscale.ParallelConfig` with replicas."""
    asked: dict[str, Any] = {
        "gradient_compression": random.choice(("bf16", "fp16", "powersgd", "powersgd"))
    }
    if asked["gradient_compression"] == "powersgd":
        asked["powersgd_rank"] = random.choice((1, 2, 3))
    return asked


def stochastic_rounding(random: Random) -> dict[str, Any]:
    """A name of :func:`hfscale.create_optimizer` that rounds by chance."""
    return {"optimizer": random.choice(BY_CHANCE)}


LEVERS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "fp8": float8,
    "fp16": loss_scaling,
    "compress_activations": compress_activations,
    "gradient_compression": gradient_compression,
    "stochastic_rounding": stochastic_rounding,
}
"""By the name that :attr:`tests.fuzz.Draw.levers` has for it."""
