"""What the judge knows of levers that round or scale: how coarse each is, and how one process does the same."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import GradScalerKwargs
from torch import nn

import hfscale
from hfscale.features.memory import stored
from hfscale.models.module_kinds import PROJECTIONS
from hfscale.plan.feature_plans import ProductsPlan
from tests.float8_reference import convert, float8_in_32_bits, in_32_bits

from .draw import Draw

COMPUTES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What a mixed precision computes in where weights are in 32 bits; float64 stays what it is."""

EIGHT_BITS = "8 bits"
"""The kind of number that kept activations are."""

_SENT = {"bf16": "bfloat16", "fp16": "float16"}
_FITS = 2.0**16
"""A loss scale up to which no drawn model's gradients may overflow."""


def computes_in(draw: Draw) -> torch.dtype:
    """The type of forward and backward passes."""
    own: torch.dtype = getattr(torch, draw.dtype)
    return own if own == torch.float64 else COMPUTES.get(draw.mixed_precision, own)


def kinds(draw: Draw) -> list[str]:
    """Every kind of number that a gradient goes through."""
    found = [str(computes_in(draw)).removeprefix("torch.")]
    if draw.compression in _SENT:
        found.append(_SENT[draw.compression])
    if (draw.memory or {}).get("compress_activations"):
        found.append(EIGHT_BITS)
    return found


def unrounded(draw: Draw) -> Draw:
    """The draw without what rounds in blocks or sums that a layout has others of: what is rounded there."""
    memory = {
        name: value for name, value in (draw.memory or {}).items() if name != "compress_activations"
    }
    layout = {
        name: value
        for name, value in draw.layout.items()
        if name not in ("gradient_compression", *_OF_FACTORS)
    }
    return draw.change(memory=memory or None, layout=layout)


_OF_FACTORS = ("powersgd_rank",)


def send_gradients(draw: Draw, parameters: Sequence[nn.Parameter]) -> None:
    """Round gradients once, as replicas do with the terms of theirs."""
    if draw.compression in _SENT:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(getattr(torch, _SENT[draw.compression])).to(
                    parameter.dtype
                )


def multiply_in_8_bits(draw: Draw, model: Any, config: Any, **kwargs: Any) -> None:
    """Have a stock model round in the products of the projections that a plan for one process names."""
    if draw.mixed_precision != "fp8":
        return
    planned = hfscale.plan(config, **planned_by(draw), **kwargs).feature(ProductsPlan)
    names = () if planned is None else planned.modules
    around = "base_model." if "prompt" in (draw.peft or {}) else "base_model.model."

    def chosen(module: nn.Module, name: str) -> bool:
        name = name.removeprefix(around).removesuffix(".base_layer")
        name = name.removesuffix(".modules_to_save.default")  # a copy of a projection is one
        return isinstance(module, PROJECTIONS) and name in names

    convert(model, (draw.float8 or {}).get("recipe", "tensorwise"), chosen)


def planned_by(draw: Draw) -> dict[str, Any]:
    """Arguments of a plan that say what is multiplied in 8 bits."""
    float8 = {} if draw.float8 is None else {"float8": hfscale.Float8Config(**draw.float8)}
    return {"mixed_precision": draw.mixed_precision, **float8}


def scaled_by(draw: Draw) -> dict[str, Any]:
    """The argument that says how a loss is scaled."""
    return (
        {} if draw.loss_scaling is None else {"loss_scaling": GradScalerKwargs(**draw.loss_scaling)}
    )


@contextmanager
def roundings_in_32_bits() -> Iterator[None]:
    """Within: what rounds to 8 bits takes 32 of them, although float64 stays float64 around it."""
    with float8_in_32_bits(), in_32_bits(stored, "compress"):
        yield


class LossScale:
    """``torch.amp.GradScaler``'s arithmetic over weights of any type; a scale of 1 where nothing is scaled."""

    def __init__(self, draw: Draw) -> None:
        self._how = GradScalerKwargs(**(draw.loss_scaling or {}))
        self._active = draw.mixed_precision == "fp16"
        self.scale = self._how.init_scale if self._active else 1.0
        self._growth = 0

    def over(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Gradients become true; where one is not finite, all vanish, and the step is to be skipped.

        Raises:
            ArithmeticError: stock code overflows at a scale that should fit, so there is nothing to equal.
        """
        if not self._active:
            return False
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        overflows = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        if overflows and self.scale <= _FITS:
            raise ArithmeticError(
                f"stock code's gradients overflow float16 at a loss scale of {self.scale}"
            )
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = None if overflows else parameter.grad / self.scale
        self._growth = 0 if overflows else self._growth + 1
        if overflows:
            self.scale *= self._how.backoff_factor
        elif self._growth == self._how.growth_interval:
            self.scale = self.scale * self._how.growth_factor
            self._growth = 0
        return overflows
