"""How far a rank is from one process, and how far it may be.

In float64 a difference may be 1e-9 of the largest entry of the whole tensor, as everywhere in hfscale's tests. In
narrower types the yardstick is stock code itself: with ``e(x) = |x - x64| / |x64|`` (Frobenius norms, ``x64`` stock in
float64), a layout's ``e`` may be four times that of stock code in the same type - of the tensor, or the median over all
tensors where that is larger - and a few roundings: a layout only adds in another order. What is smaller than a
thousandth (in bfloat16; a millionth in float32) of the largest gradient is measured against that.

What is zero in truth has no scale of its own: the gradients of queries and keys where a token attends to itself alone,
or of a bias that softmax does not see. All that is left of one is rounding in sums that cancel, and another order of
sums changes all of it. A tensor is taken for zero where it is, in float64, within 64 roundings of the largest gradient
or of the loss (keys alone may train, and rows have one token), or of what the optimizer makes of as much in a weight
that began as zero (AdamW divides by little more than its eps):

- in float64 it may differ by that much;
- in narrower types it may be as far from zero as stock code's worst tensor is from the truth, since its own sum may
  happen to cancel to the last bit in stock code;
- of a quantized model there is nothing but stock code in the same type: 64 of its roundings of the largest gradient are
  uncertain everywhere.

A norm may happen to be right where the gradient is not: ``| |a| - |b| | <= |a - b|``, so it may be off by as much as
stock code's gradients are, all together (8 bits over bfloat16: 0.27 to 0.45 of six layers' gradient, and from
-0.06 to 0.04 of its norm, as roundings fall).

A rectifier's derivative jumps: of an activation near zero, rounding to 16 bits decides whether there is a gradient. How
many flip is luck, in stock code too, so gradients behind one may be three tenths off (OPT in bfloat16: 0.01 to 0.11
over tensor ranks, 0.06 in one process; with GELU in its place, 0.007 to 0.01).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isinf
from typing import Any

import torch
from torch import Tensor

from hfscale.testing.differences import difference

from .draw import Draw
from .levers import EIGHT_BITS, computes_in, kinds
from .models import loses_bits, most_gain, rectifies
from .reference import Record, Step

EXACT = 1e-9
_ROUNDING = {
    "float64": 2.0**-52 * 64,
    "float32": 2.0**-23 * 64,
    "float16": 2.0**-11 * 4,
    EIGHT_BITS: 1e-2,
    "bfloat16": 2.0**-8 * 4,
}
_SMALL = {"float64": 1e-6, "float32": 1e-6, "float16": 1e-3, EIGHT_BITS: 1e-3, "bfloat16": 1e-3}
_COARSE = {"float16", EIGHT_BITS, "bfloat16"}
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
        self.kind = max(kinds(draw), key=_ROUNDING.__getitem__)
        self.exact = self.kind == "float64"
        forward = str(computes_in(draw)).removeprefix("torch.")
        self.exact_forward = forward == "float64"
        self.largest = {
            kind: [_largest(_tensors_of(step, kind).values()) for step in record.steps]
            for kind in ("gradient", "weight")
        }
        self.rectified = rectifies(draw)
        self.rough = not aligned or (mixture and forward in _COARSE)
        self.strays = mixture and self.kind in _COARSE

    def scalar(
        self, kind: str, step: int, found: float, wanted: float, narrow: float | None
    ) -> None:
        """A loss or a norm."""
        zero = self._zero("gradient", step) if kind == "norm" and self.exact else 0.0
        scale = max(abs(wanted), 1e-30, zero / EXACT if abs(wanted) <= zero else 0.0)
        error = abs(found - wanted) / scale
        if step > 0 and not self.follows():
            self.worst.note("finite", float(found != found), 0.5, f"step {step}: {found!r}")
            return
        stock = None if narrow is None else abs(narrow - wanted) / scale
        noise = self._noise(step) / scale if stock is not None and kind == "norm" else 0.0
        if stock is not None and isinf(self.draw.norm_type):
            stock = max(stock, noise)
        whole = kind == "loss" and step == 0 and self.exact_forward and not self.rough
        bound = EXACT if whole else max(self._bound(stock, step), noise)
        self.worst.note(kind, error, bound, f"step {step}: {found!r} for {wanted!r}")

    def tensors(
        self, kind: str, step: int, pairs: list[tuple[str, Tensor, Tensor, Tensor]]
    ) -> None:
        """Gradients or weights: name, what was found, its counterpart, and the whole of that."""
        if self.rough or ((kind == "weight" or step > 0) and not self.follows()):
            for name, found, _, _ in pairs:
                self.worst.note("finite", float(not torch.isfinite(found).all()), 0.5, name)
            return
        if not self.exact:
            self._narrow_tensors(kind, step, pairs)
            return
        for name, found, wanted, whole in pairs:
            error = difference(found, wanted, whole, self.least_scale(kind, step, whole))
            self.worst.note(kind, error, EXACT, f"step {step}: {name}")

    def least_scale(self, kind: str, step: int, whole: Tensor) -> float:
        """The scale that is the least of ``whole``'s in float64."""
        zero = self._zero(kind, step)
        if _largest([whole]) <= zero:
            return max(zero / EXACT, 1e-30)
        return max(_SMALL["float64"] * self.largest[kind][step], 1e-30)

    def _zero(self, kind: str, step: int) -> float:
        """How much rounding can make, in float64, of what is zero in truth."""
        if kind == "gradient":
            losses = (abs(loss) for row in self.record.steps[step].losses for loss in row)
            return _ROUNDING["float64"] * max(self.largest[kind][step], *losses, 0.0)
        norm = self.record.steps[step].norm
        clipped = min(1.0, self.draw.max_norm / max(norm, 1e-30)) if self.draw.max_norm else 1.0
        before = self._zero(kind, step - 1) if step else 0.0
        return before + most_gain(self.draw) * clipped * self._zero("gradient", step)

    def _narrow_tensors(
        self, kind: str, step: int, pairs: list[tuple[str, Tensor, Tensor, Tensor]]
    ) -> None:
        """The same in Frobenius norms, with stock code in the same type as the yardstick."""
        every = _tensors_of(self.record.steps[step], kind)
        norms = {name: float(value.double().norm()) for name, value in every.items()}
        largest = max(norms.values(), default=1.0)
        floor = max(_SMALL[self.kind] * largest, 1e-30)
        other = _tensors_of(self.record.narrow[step], kind) if self.record.narrow else {}
        apart = {
            name: float((value.double() - every[name].double()).norm())
            for name, value in other.items()
        }
        ratios = sorted(value / max(norms[name], floor) for name, value in apart.items())
        for name, found, wanted, whole in pairs:
            scale = max(float(whole.double().norm()), floor)
            error = float((found.double() - wanted.double()).norm()) / scale
            stock = None
            if apart:
                own = (
                    max(apart.values())
                    if _largest([whole]) <= self._zero(kind, step)
                    else apart[name]
                )
                stock = max(own / scale, ratios[len(ratios) // 2])
            bound = max(
                self._bound(stock, step), _ROUGH if self.rectified and self.kind in _COARSE else 0.0
            )
            if self.draw.quantize is not None:
                bound += _ROUNDING[self.kind] * largest / scale
            self.worst.note(kind, error, bound, f"step {step}: {name}")

    def follows(self) -> bool:
        """Whether what comes after an update is as exact as the gradient was."""
        if self.rough or self.strays or loses_bits(self.draw):
            return False
        return self.exact or self.draw.optimizer in ("SGD", "sgd")

    def _noise(self, step: int) -> float:
        """The norm of all that stock code's gradients are off, which is the most that their norm may be."""
        exact = self.record.steps[step].gradients
        narrow = self.record.narrow[step].gradients
        apart = [
            narrow[name].double() - value.double()
            for name, value in exact.items()
            if name in narrow
        ]
        return float(torch.nn.utils.get_total_norm(apart, self.draw.norm_type))

    def _bound(self, stock: float | None, step: int) -> float:
        if self.rough or (step > 0 and not self.follows()):
            return _ROUGH
        if self.draw.quantize is not None:
            return _QUANTIZED[self.draw.quantize] * (1 if self.kind == "float32" else 25)
        if self.exact:
            return EXACT
        return _FACTOR * (stock or 0.0) + _ROUNDING[self.kind] * (1 + step)


def _tensors_of(step: Step, kind: str) -> dict[str, Tensor]:
    return step.gradients if kind == "gradient" else step.weights


def _largest(tensors: Iterable[Tensor]) -> float:
    return max((float(value.abs().max()) for value in tensors if value.numel()), default=0.0)


def plain(worst: Worst) -> dict[str, Any]:
    """For a file."""
    return {kind: list(found) for kind, found in worst.ratios.items()}
