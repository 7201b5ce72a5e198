"""How far a rank is from one process, and how far it may be.

In float64 a difference may be 1e-9 of the largest entry of the whole tensor, as everywhere in hfscale's tests. In
narrower types the yardstick is stock code itself: with ``e(x) = |x - x64| / |x64|`` (Frobenius norms, ``x64`` stock in
float64), a layout's ``e`` may be four times that of stock code in the same type - of the tensor, or the median over all
tensors where that is larger - and a few roundings: a layout only adds in another order. What is smaller than a
thousandth (in bfloat16; a millionth in float32) of the largest gradient is measured against that.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..parity import difference
from .draw import Draw
from .models import loses_bits
from .stock import Record

EXACT = 1e-9
_ROUNDING = {"float32": 2.0**-23 * 64, "bfloat16": 2.0**-8 * 4}
_SMALL = {"float32": 1e-6, "bfloat16": 1e-3}
_FACTOR = 4.0
_QUANTIZED = {"nf4": 2e-3, "fp4": 2e-3, "int8": 0.1}
_ROUGH = 0.3


@dataclass
class Worst:
    """The largest difference of each kind over what it may be; more than 1 is wrong."""

    ratios: dict[str, tuple[float, float, str]] = field(default_factory=dict)

    def note(self, kind: str, value: float, bound: float, name: str = "") -> None:
        """``value`` where ``bound`` is allowed; what is no number is infinitely wrong."""
        ratio = value / bound if value == value else float("inf")
        if kind not in self.ratios or ratio > self.ratios[kind][0]:
            self.ratios[kind] = (ratio, value, name)


class Yardstick:
    """Compares a draw's tensors with those of one process.

    Args:
        aligned: whether every quantized block is one of one process.
        mixture: whether rounding may send a token to another expert.
    """

    def __init__(self, draw: Draw, record: Record, aligned: bool, mixture: bool) -> None:
        self.draw, self.record, self.worst = draw, record, Worst()
        self.kind = "bfloat16" if "bf16" in draw.mixed_precision else draw.dtype
        self.exact = self.kind == "float64"
        self.rough = not aligned or (mixture and (self.kind == "bfloat16" or draw.quantize is not None))

    def scalar(self, kind: str, step: int, found: float, wanted: float, narrow: float | None) -> None:
        """A loss or a norm."""
        scale = max(abs(wanted), 1e-30)
        error = abs(found - wanted) / scale
        if step > 0 and not self.follows():
            self.worst.note("finite", float(found != found), 0.5, f"step {step}: {found!r}")
            return
        stock = None if narrow is None else abs(narrow - wanted) / scale
        self.worst.note(kind, error, self._bound(stock, step), f"step {step}: {found!r} for {wanted!r}")

    def tensors(self, kind: str, step: int, pairs: list[tuple[str, Tensor, Tensor, Tensor]]) -> None:
        """Gradients or weights: name, what was found, its counterpart, and the whole of that."""
        if self.rough or ((kind == "weight" or step > 0) and not self.follows()):
            for name, found, _, _ in pairs:
                self.worst.note("finite", float(not torch.isfinite(found).all()), 0.5, name)
            return
        steps, narrow = self.record.steps, self.record.narrow
        every = steps[step].gradients if kind == "gradient" else steps[step].weights
        if self.exact:
            floor = 1e-6 * max((float(value.abs().max()) for value in every.values() if value.numel()), default=0.0)
            for name, found, wanted, whole in pairs:
                error = difference(found, wanted, whole, max(floor, 1e-30))
                self.worst.note(kind, error, self._bound(None, step), f"step {step}: {name}")
            return
        largest = max((float(value.norm()) for value in every.values()), default=1.0)
        floor = max(_SMALL[self.kind] * largest, 1e-30)
        stock: dict[str, float] = {}
        if narrow:
            other = narrow[step].gradients if kind == "gradient" else narrow[step].weights
            stock = {
                name: float((other[name].double() - value.double()).norm()) / max(float(value.norm()), floor)
                for name, value in every.items()
            }
        median = sorted(stock.values())[len(stock) // 2] if stock else 0.0
        for name, found, wanted, whole in pairs:
            error = float((found.double() - wanted.double()).norm()) / max(float(whole.double().norm()), floor)
            bound = self._bound(max(stock[name], median) if stock else None, step)
            self.worst.note(kind, error, bound, f"step {step}: {name}")

    def follows(self) -> bool:
        """Whether what comes after an update is as exact as the gradient was."""
        if self.rough or loses_bits(self.draw):
            return False
        return self.exact or self.draw.optimizer in ("SGD", "sgd")

    def _bound(self, stock: float | None, step: int) -> float:
        if self.rough or (step > 0 and not self.follows()):
            return _ROUGH
        if self.draw.quantize is not None:
            return _QUANTIZED[self.draw.quantize] * (1 if self.kind == "float32" else 25)
        if self.exact:
            return EXACT
        return _FACTOR * (stock or 0.0) + _ROUNDING[self.kind] * (1 + step)


def plain(worst: Worst) -> dict[str, Any]:
    """For a file."""
    return {kind: list(found) for kind, found in worst.ratios.items()}
