"""The projection onto the vocabulary, run on some rows at a time with its gradients taken at once.

A head is anything that maps ``[n, h]`` to ``[n, V/t]`` row by row. Gradients of its parameters are sums over the rows,
kept in one buffer each; gradients by the rows are returned chunk by chunk.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Pointwise = Callable[[Tensor], Tensor]

_SLICE_ELEMENTS = 1 << 24  # of a low-precision product on its way into a float32 sum


class HeadRows(Protocol):
    """The interface of a head as :func:`hfscale.distributed.ops.head_cross_entropy` runs it.

    Attributes:
        parameters: its parameters, trained or not.
        reusable: whether the gradient may be written into the last logits, which nothing reads any more.
    """

    parameters: Sequence[Tensor]
    reusable: bool

    def logits(self, rows: Tensor, gradients: bool) -> Tensor:
        """Compute logits ``[n, V/t]`` of rows ``[n, h]``, without a graph; ``gradients`` announces :meth:`backward`."""
        ...

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Return the rows' gradient ``[n, h]`` for that of the last logits, and add up the parameters' gradients."""
        ...

    def sums(self) -> list[Tensor | None]:
        """Return the gradient of every parameter, ``None`` where it does not train."""
        ...


class LinearRows:
    """A plain ``nn.Linear``: two matrix products, the second accumulated into the weight's buffer.

    Args:
        finish: pointwise operations of the model on the logits (a softcap, a scale); ``None`` for none.
        reusable: whether no operation of ``finish`` keeps its last result for its own gradient.
        needed: whether the rows' gradients are asked for.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, finish: Pointwise | None, reusable: bool, needed: bool
    ) -> None:
        self.weight, self.bias, self.finish, self.reusable, self.needed = weight, bias, finish, reusable, needed
        self.parameters: Sequence[Tensor] = [weight] if bias is None else [weight, bias]
        self._sums = [_Sum(parameter) for parameter in self.parameters]
        self._kept: tuple[Any, ...] = ()

    def logits(self, rows: Tensor, gradients: bool) -> Tensor:
        """Compute logits; see :class:`HeadRows`."""
        raw = F.linear(rows, self.weight, self.bias)
        if self.finish is None:
            self._kept = (rows, None, None)
            return raw
        with torch.set_grad_enabled(gradients):
            final = self.finish(raw.requires_grad_(gradients))
        self._kept = (rows, raw, final) if gradients else ()
        return final.detach()

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Return the rows' gradient; see :class:`HeadRows`."""
        (rows, raw, final), self._kept = self._kept, ()
        if self.finish is not None:
            (gradient,) = torch.autograd.grad(final, raw, gradient)
        self._sums[0].add_product(gradient, rows)
        if self.bias is not None:
            self._sums[1].add(gradient.sum(0))
        return gradient @ self.weight if self.needed else None

    def sums(self) -> list[Tensor | None]:
        """Return the parameters' gradients; see :class:`HeadRows`."""
        return [each.total() for each in self._sums]


class AnyRows:
    """Any other head - with adapters, quantized, under autocast: autograd takes its gradients."""

    reusable = False  # unknown operations may keep what they returned

    def __init__(self, head: Pointwise, parameters: Sequence[Tensor], finish: Pointwise | None, needed: bool) -> None:
        self.head, self.parameters, self.finish, self.needed = head, parameters, finish, needed
        self._sums = [_Sum(parameter) for parameter in parameters]
        self._kept: tuple[Any, ...] = ()

    def logits(self, rows: Tensor, gradients: bool) -> Tensor:
        """Compute logits; see :class:`HeadRows`."""
        with torch.set_grad_enabled(gradients):
            final = self.head(rows.requires_grad_(gradients and self.needed))
            if self.finish is not None:
                final = self.finish(final)
        self._kept = (rows, final) if gradients else ()
        return final.detach()

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Return the rows' gradient; see :class:`HeadRows`."""
        (rows, final), self._kept = self._kept, ()
        trained = [each for each in self._sums if each.trains]
        inputs = [each.parameter for each in trained] + [rows] * self.needed
        found = list(torch.autograd.grad(final, inputs, gradient, allow_unused=True))
        by_rows = found.pop() if self.needed else None
        for each, part in zip(trained, found, strict=True):
            if part is not None:
                each.add(part)
        return by_rows

    def sums(self) -> list[Tensor | None]:
        """Return the parameters' gradients; see :class:`HeadRows`."""
        return [each.total() for each in self._sums]


class _Sum:
    """The gradient of one parameter, added up in float32 at least: 16-bit sums would round once per chunk."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.trains = parameter, parameter.requires_grad
        self._total: Tensor | None = None

    def add(self, part: Tensor) -> None:
        if self.trains:
            if self._total is None:
                self._total = self._buffer().zero_()
            self._total.add_(part)

    def add_product(self, gradient: Tensor, rows: Tensor) -> None:
        """Add ``gradient.T @ rows`` (``gradient [n, V/t]``, ``rows [n, h]``) to the weight's gradient ``[V/t, h]``."""
        if not self.trains:
            return
        first = self._total is None
        if self._total is None:
            self._total = self._buffer()
        if self._total.dtype == rows.dtype:
            self._total.addmm_(gradient.T, rows, beta=0 if first else 1)  # 0: the empty buffer is not read
            return
        step = max(1, _SLICE_ELEMENTS // rows.shape[1])
        for i in range(0, gradient.shape[1], step):
            part = gradient[:, i : i + step].T @ rows
            self._total[i : i + step].copy_(part) if first else self._total[i : i + step].add_(part)

    def total(self) -> Tensor | None:
        if not self.trains:
            return None
        return torch.zeros_like(self.parameter) if self._total is None else self._total.to(self.parameter.dtype)

    def _buffer(self) -> Tensor:
        dtype = torch.promote_types(self.parameter.dtype, torch.float32)
        return torch.empty_like(self.parameter, dtype=dtype, memory_format=torch.contiguous_format)
