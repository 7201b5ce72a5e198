"""Add an adapter's low-rank product to a projection's output, with a hand-written backward pass (LoRA, Hu et al. 2021).

::

    forward    x --------> enter ----> projection ----> y                 y, written in place
               |                                        + <-- h B^T
               +--> h = s x A^T  [n, r] ---------------------^
    backward   da = s g B       dA = da^T x       dB = g^T h       dx = (the projection's) + da A, in place

Here ``g`` is the gradient of ``y`` and ``s`` the adapter's scale. ``x`` and ``h`` are saved for the backward pass.
``x`` is the tensor that all projections of a block read, while autograd would save a copy of ``x`` in the factors'
dtype for each projection. The adapter's backward pass runs before the projection's, because the adapter comes later in
the forward pass. It passes ``da`` to :func:`enter`, a node before the projection, which adds ``da A`` to the ``dx``
that the projection's backward pass has just returned. ``dA`` and ``dB`` are computed in the same node or, while a
block's backward collective runs, in a later node (:class:`.overlap.DeferredGradients`).

A backward pass in two halves (zero-bubble schedules) runs this node twice; each time only the requested gradients are
computed.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._compat.torch import gradients_asked, version_of
from .overlap import FactorTokens
from .shared_casts import autocast_dtype, autocasted, autocasted_weight
from .thin_products import add_from_thin, from_thin, thin_gradient, to_thin, with_from_thin


class Term:
    """Hold an adapter's term ``da A`` of the gradient of its projection's input until :func:`enter` adds it to the
    gradient.

    ``A [r, in]`` is the adapter's first factor, and ``da [n, r]`` the gradient of the product of the input and ``A^T``.
    """

    def __init__(self, in_place: bool = True) -> None:
        # in_place: whether the term may be added to the projection's gradient in place
        self.in_place = in_place
        self.factors: tuple[Tensor, Tensor] | None = None

    def added_to(self, grad: Tensor) -> Tensor:
        """Return the gradient ``[..., in]`` plus the adapter's term ``da A``.

        The term is added in place, except with ``create_graph`` or if :class:`Term` was made with ``in_place=False``.
        """
        if self.factors is None:
            return grad
        thin, factor = self.factors
        self.factors = None
        if torch.is_grad_enabled():
            return grad + thin.mm(factor).to(grad.dtype).view_as(grad)
        grad = grad if self.in_place else grad.clone(memory_format=torch.contiguous_format)
        add_from_thin(grad.view(-1, grad.shape[-1]), thin, factor)
        return grad


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Term) -> Tensor:
        ctx.term = term
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.term.added_to(grads[0]), None


def enter(x: Tensor, term: Term) -> Tensor:
    """Return ``x [..., in]``, for one projection to read; the backward pass adds an adapter's ``term`` to the gradient
    of ``x``.
    """
    return _Enter.apply(x, term)


@dataclass(frozen=True)
class Factors:
    """Hold the factors, the bias and the scale of one adapter, as :func:`add_low_rank` computes with them."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    bias: Tensor | None  # [out], added after ``b``
    scale: float
    tokens: FactorTokens | None = (
        None  # set if ``a`` and ``b`` are tokens, whose gradients are computed later
    )


def add_low_rank(y: Tensor, x: Tensor, factors: Factors, term: Term | None) -> Tensor:
    """Add a LoRA adapter's product to a projection's output ``y [..., out]`` in place, and return the sum,
    ``y + scale (x a^T b^T + bias)``, for the projection's input ``x [..., in]``.

    ``y`` must be contiguous, and no other code may hold a reference to it. In compiled code, ``x`` and ``y`` have two
    dims, and the sum is a new tensor. Products are computed in the dtype of the factors or, under autocast, in the
    autocast dtype. With a ``term``, the gradient of ``x`` is stored in the term instead of being returned to autograd.
    """
    read = factors.a, factors.b, factors.bias
    return _AddLowRank.apply(y, x, *read, factors.scale, term, factors.tokens)


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        scale: float,
        term: Term | None,
        tokens: FactorTokens | None,
    ) -> Tensor:
        ctx.types = x.dtype, a.dtype
        ctx.tokens = tokens
        ctx.scale = scale
        ctx.term = term
        ctx.bias = None if bias is None else bias.dtype
        kind = y.device.type
        if not torch.is_autocast_enabled(kind):
            return _added(ctx, y, x, a, b, bias)
        x = autocasted(x)
        a = autocasted_weight(a)
        b = autocasted_weight(b)
        with torch.autocast(kind, enabled=False):
            return _added(ctx, y, x, a, b, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        given, own = ctx.types
        x, thin, a, b = ctx.saved_tensors
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            by_y, by_x, *others = _differentiable(ctx, grad, x, a, b)
            return by_y.view_as(grads[0]), None if by_x is None else by_x.view(shape), *others
        y_asked, x_asked, a_asked, b_asked, *bias_asked = gradients_asked(ctx)
        by_x = by_a = by_b = by_bias = None
        # With a term, the gradient of the input is needed whenever the projection runs its backward pass.
        goes_on = x_asked if ctx.term is None else y_asked
        if goes_on or a_asked:
            down = to_thin(grad, b, ctx.scale)
            if goes_on and ctx.term is not None:
                ctx.term.factors = down, a
            elif goes_on:
                by_x = from_thin(down, a, given).view(shape)
            if a_asked:
                by_a = _now_or_later(ctx.tokens, 0, own, partial(thin_gradient, down, x))
        if b_asked:
            to_b = partial(thin_gradient, thin, grad, transposed=True)
            by_b = _now_or_later(ctx.tokens, 1, own, to_b)
        if ctx.bias is not None and bias_asked[0]:
            by_bias = (grad.sum(0) * ctx.scale).to(ctx.bias)
        return grads[0], by_x, by_a, by_b, by_bias, None, None, None


def _now_or_later(
    tokens: FactorTokens | None, number: int, dtype: torch.dtype, compute: Callable[[], Tensor]
) -> Tensor | None:
    """Return the gradient of factor ``number``; if it is a token, leave the computation for later."""
    if tokens is None:
        return compute().to(dtype)
    tokens.later.leave(tokens.number + number, lambda: compute().to(dtype))
    return None


def _added(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    thin = to_thin(x.reshape(-1, x.shape[-1]), a.t(), ctx.scale)
    ctx.save_for_backward(x, thin, a, b)
    if torch.compiler.is_compiling():
        y = with_from_thin(y, thin, b.t())
    else:
        ctx.mark_dirty(y)
        add_from_thin(y.view(-1, y.shape[-1]), thin, b.t())
    return y if bias is None else y.add_(bias, alpha=ctx.scale)


def _differentiable(ctx: Any, grad: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Any:
    """Return the gradients of :func:`add_low_rank` in a backward pass with ``create_graph``.

    They are computed from its inputs alone, because the saved product of the input and the first factor has no graph.
    """
    given, own = ctx.types
    without_graph = ctx.term is not None and not x.requires_grad
    if without_graph or x.dtype != given or a.dtype != own:
        raise RuntimeError(
            "gradients of fused adapters under autocast cannot be differentiated a second time, got "
            "create_graph=True: build the model with fused_adapters=False"
        )
    wide = grad.to(own)
    down = wide.mm(b) * ctx.scale
    if ctx.term is not None:
        ctx.term.factors = down, a
    by_x = None if ctx.term is not None else down.mm(a).to(given)
    by_b = wide.t().mm(x.to(own).mm(a.t())) * ctx.scale
    by_bias = None if ctx.bias is None else (grad.sum(0) * ctx.scale).to(ctx.bias)
    return grad, by_x, down.t().mm(x.to(own)), by_b, by_bias, None, None, None


class LastCast:
    """Share one copy of an input, in the autocast dtype, between consecutive projections that read this input.

    The copy is kept while the input is alive, and replaced when a projection reads another tensor.
    """

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def of(self, x: Tensor) -> Tensor:
        """Return ``x`` in the dtype in which autocast would pass it to a matrix product: ``x`` itself, or a detached
        copy, which is made only once for consecutive calls with the same ``x``.
        """
        dtype = autocast_dtype(x)
        if x.dtype == dtype:
            return x
        known = self._known
        if known is not None and known[0]() is x:
            _, version, cast = known
            if version == version_of(x) and cast.dtype == dtype:
                return cast
        cast = x.detach().to(dtype)
        self._known = weakref.ref(x, self._forget), version_of(x), cast
        return cast

    def _forget(self, reference: "weakref.ref[Tensor]") -> None:
        if self._known is not None and self._known[0] is reference:
            self._known = None
