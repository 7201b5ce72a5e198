"""Levers that round or scale numbers in runs that are killed: what layouts, models and optimizers are given for them.

Levers are those of random layouts (:data:`tests.fuzz.lever_values.LEVERS`).
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from random import Random
from typing import Any

import torch

from hfscale.models.precision import keep_float64

from . import lever_values
from .levers import roundings_in_32_bits

Levers = Mapping[str, Mapping[str, Any]]
"""By name, what is asked of each."""

_TOGETHER = (
    {"fp16", "gradient_compression"},
    {"fp8", "compress_activations"},
    {"fp16", "compress_activations"},
)


def choose_levers(random: Random) -> dict[str, dict[str, Any]]:
    """One of them, or two that go together; none now and then."""
    if random.random() < 0.3:
        return {}
    names = [random.choice(list(lever_values.LEVERS))]
    other = random.choice(list(lever_values.LEVERS))
    if {names[0], other} in _TOGETHER:
        names.append(other)
    levers = {name: lever_values.LEVERS[name](random) for name in names}
    # So that a scale grows behind the save, by steps that were counted before it.
    if "fp16" in levers:
        levers["fp16"].setdefault("growth_interval", 5)
    return levers


def are_exact(levers: Levers) -> bool:
    """Whether each layout computes, in float64, what one process does with the same levers."""
    return set(levers) <= {"fp8", "fp16"} and dtype_with(levers) == torch.float64


def dtype_with(levers: Levers) -> torch.dtype:
    """Of weights: the widest, but where a scale is to overflow, or weights are to be rounded."""
    if "stochastic_rounding" in levers:
        return torch.bfloat16
    return (
        torch.float32 if levers.get("fp16", {}).get("init_scale", 1.0) > 2.0**16 else torch.float64
    )


def layout_with(levers: Levers, layout: dict[str, Any]) -> dict[str, Any]:
    """The same layout: replicas compress what they send, and stages run the microbatches they get."""
    if row_by_row(levers):
        layout = {name: value for name, value in layout.items() if name != "num_microbatches"}
    return (
        {**layout, **levers.get("gradient_compression", {})}
        if layout.get("dp_replicate_size", 1) > 1
        else layout
    )


def row_by_row(levers: Levers) -> bool:
    """Whether each row is a microbatch: what is multiplied in 8 bits has one scale, in whatever layout it is."""
    return "fp8" in levers


def planned_with(levers: Levers) -> dict[str, Any]:
    """What :func:`hfscale.plan` and all that builds a model are told."""
    import hfscale

    asked: dict[str, Any] = {}
    if "fp16" in levers:
        asked["mixed_precision"] = "fp16"
    if "fp8" in levers:
        asked |= {"mixed_precision": "fp8", "float8": hfscale.Float8Config(**levers["fp8"])}
    if "compress_activations" in levers:
        asked["memory"] = hfscale.MemoryConfig(**levers["compress_activations"])
    return asked


def built_with(levers: Levers) -> dict[str, Any]:
    """The same, and how a loss is scaled."""
    from accelerate import GradScalerKwargs

    scaled = {"loss_scaling": GradScalerKwargs(**levers["fp16"])} if "fp16" in levers else {}
    return {**planned_with(levers), **scaled}


@contextmanager
def arithmetic_of(dtype: torch.dtype) -> Iterator[None]:
    """Within: float64 stays float64, and what rounds to 8 bits takes 32."""
    with ExitStack() as stack:
        stack.enter_context(keep_float64() if dtype == torch.float64 else nullcontext())
        stack.enter_context(roundings_in_32_bits())
        yield
