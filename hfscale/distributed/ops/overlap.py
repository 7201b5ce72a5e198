"""Compute weight gradients while the collective on the gradient of their projections' input is under way.

Backward through a projection makes two products: the gradient of its input, which the other ranks wait for, and that of
its weight, which nobody waits for. Here one autograd node takes the input of a tensor-parallel region and the weights
of all projections that read it, and returns both as the projections must use them::

    forward    x, W1, W2 --enter--> x inside, W1, W2 --> projections 1, 2 --> ...
    backward   projections 2, 1 (input gradients) -> enter: the collective starts, gradients of W1 and W2, it has ended

The products are the same, on the same operands, so results are equal bit by bit. The idea is Megatron-LM's (the
asynchronous all-reduce in its column-parallel layer; Shoeybi et al. 2019), for projections that stay modules.

A projection with products other than torch's own (in 8 bits, say) registers them by :func:`multiply_by`.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..._compat.torch import backward_pass, version_of
from .collectives import Started
from .shared_casts import autocasted, autocasted_weight

_ATTRIBUTE = "_hfscale_products"


class Products:
    """Torch's own products. An instance serves one pass: it may note operands of the output for the gradients.

    Weights are ``[out, in]`` here, whichever way round a module keeps them.
    """

    def kept(self, weight: Tensor) -> Tensor:
        """Return the form of the weight to save for the backward pass."""
        return autocasted_weight(weight)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output ``[..., out]`` of ``x [..., in]``."""
        return F.linear(x, weight, bias)

    def to_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the input's gradient ``[n, in]``, given that of the output, ``grad [n, out]``."""
        return grad.mm(weight)

    def to_weight(self, grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
        """Return the weight's gradient ``[out, in]``, or ``[in, out]``, of ``grad [n, out]`` and ``x [n, in]``."""
        return x.t().mm(grad) if transposed else grad.t().mm(x)


def multiply_by(module: nn.Module, products: Callable[[], Products]) -> None:
    """Set the ``products`` of a projection, which :func:`column_parallel_linear` then uses.

    Args:
        products: returns those of a pass that begins: a function, or an object that deep copies of the module may
            share.
    """
    setattr(module, _ATTRIBUTE, products)


def multiplied_by(module: Any) -> Callable[[], Products]:
    """Return what :func:`multiply_by` set, or torch's own."""
    chosen: Callable[[], Products] = module.__dict__.get(_ATTRIBUTE, Products)
    return chosen


def products_of(module: Any) -> Products:
    """Return the products of a projection for the pass that begins."""
    return multiplied_by(module)()


Start = Callable[[Tensor], Started]
Derive = Callable[[Tensor], Tensor]
"""Derives from a gathered tensor ``[n, h]`` what the forward pass made of it: another type, or with entries dropped."""


class Regather:
    """A second gather of a tensor in the backward pass, for projections that read it or a tensor derived from it."""

    def __init__(self, gather: Start, early: bool, whole: Tensor | None = None) -> None:
        self.gather, self.early, self.readers, self.left = gather, early, 0, 0
        self._known: list[tuple[weakref.ref[Tensor], int, Derive]] = []
        if whole is not None:
            self._know(whole, as_it_is)
        self._started: Started | None = None
        self._whole: Tensor | None = None
        self._pass = -1  # the backward pass it was gathered for

    def gives(self, x: Tensor) -> Derive | None:
        """Return how ``x`` is derived from the gathered tensor; ``None`` if it is not, or was changed since."""
        return next((derive for known, version, derive in self._known if _is_still(x, known(), version)), None)

    def made(self, x: Tensor, found: Tensor, derive: Derive) -> None:
        """Note that ``found`` was derived from ``x``: a projection that reads ``found`` need not keep it either."""
        before = self.gives(x)
        if before is not None:
            self._know(found, lambda whole: derive(before(whole)))

    def _know(self, x: Tensor, derive: Derive) -> None:
        self._known.append((weakref.ref(x), version_of(x), derive))

    def start(self, x: Tensor) -> None:
        """Start the gather, unless a reader in this backward pass has."""
        current = backward_pass()
        if self._pass != current:
            self._pass, self._started, self._whole = current, self.gather(x), None

    def take(self, x: Tensor) -> Tensor:
        """Return the tensor gathered from ``x`` as ``[n, h]``, and drop it with the last reader."""
        self.start(x)
        if self._started is not None:
            gathered = self._started.result()
            self._whole, self._started, self.left = gathered.reshape(-1, gathered.shape[-1]), None, self.readers
        whole = self._whole
        assert whole is not None
        self.left -= 1
        if self.left == 0:
            self._whole = None
        return whole


def as_it_is(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


def _is_still(x: Tensor, known: Tensor | None, version: int) -> bool:
    if known is None or version_of(x) != version or version_of(known) != version:
        return False
    same = x.data_ptr() == known.data_ptr() and x.numel() == known.numel() and x.shape[-1] == known.shape[-1]
    return x is known or (same and x.dtype == known.dtype and x.is_contiguous() and known.is_contiguous())


class DeferredWeightGrad:
    """How the gradient of one projection's weight is computed in a pass, and when.

    Attributes:
        products: computes the projection's matrix products.
        deferred: whether the gradient waits for the node that entered the region.
        regather: gathers ``own``, this rank's shard of the input, again; ``None`` where the input is kept.
        narrow: the shard in autocast's type, and the gather of it.
    """

    def __init__(self, transposed: bool, products: Products) -> None:
        self.transposed, self.products, self.deferred = transposed, products, False
        self.own: Tensor | None = None
        self.regather: Regather | None = None
        self.narrow: tuple[Tensor, Regather] | None = None
        self.derive: Derive = as_it_is
        self.operands: tuple[Tensor, Tensor] | None = None  # input [n, in] or its shard, d output [n, out]

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """Return the weight's gradient, from the operands that the projection's backward pass has left here."""
        assert self.operands is not None
        (x, grad), self.operands = self.operands, None
        if self.regather is not None:
            x = self.derive(self.regather.take(x)).to(grad.dtype)
        return self.products.to_weight(grad, x, self.transposed).to(dtype)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gather: Start | None, reduce: Start, later: Sequence[DeferredWeightGrad], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.reduce, ctx.later, ctx.dtypes = reduce, later, [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)
        whole = x.view_as(x) if gather is None else gather(x).result()
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(whole)
        return whole, *(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *read: Tensor | None) -> tuple[Tensor | None, ...]:
        started = ctx.reduce(grad) if grad is not None and ctx.needs_input_grad[0] else None
        wanted = zip(ctx.later, ctx.dtypes, read, ctx.needs_input_grad[4:], strict=True)
        to_weights = [
            each.gradient(dtype) if needed and placeholder is not None else None
            for each, dtype, placeholder, needed in wanted
        ]
        return None if started is None else started.result(), None, None, None, *to_weights


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, own: Tensor | None, later: DeferredWeightGrad
    ) -> Tensor:
        ctx.later, ctx.dtype = later, weight.dtype
        multiplied = later.products.kept(weight)
        kept = x if own is None else own
        ctx.save_for_backward(multiplied, kept if ctx.needs_input_grad[1] else None)
        return later.products.output(x, multiplied.t() if later.transposed else multiplied, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        weight, kept = ctx.saved_tensors
        later, grad = ctx.later, grads[0].reshape(-1, grads[0].shape[-1])
        to_input = to_weight = None
        if ctx.needs_input_grad[1]:
            if later.regather is None:
                kept = kept.reshape(-1, kept.shape[-1])
            elif later.regather.early:
                later.regather.start(kept)
            later.operands = kept, grad
        if ctx.needs_input_grad[0]:
            to_input = later.products.to_input(grad, weight.t() if later.transposed else weight)
            to_input = to_input.view(*grads[0].shape[:-1], to_input.shape[-1])
        if ctx.needs_input_grad[1]:
            # Where the gradient is deferred, autograd needs something of the right shape to get to its node.
            placeholder = grad.new_zeros((), dtype=ctx.dtype).expand(weight.shape)
            to_weight = placeholder if later.deferred else later.gradient(ctx.dtype)
        to_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return to_input, to_weight, to_bias, None, None


def enter_overlapped(
    x: Tensor,
    weights: Sequence[Tensor],
    later: Sequence[DeferredWeightGrad],
    reduce: Start,
    gather: Start | None = None,
    regather: bool = False,
    early: bool = True,
) -> tuple[Tensor, list[Tensor]]:
    """Return ``x`` inside the region, and ``weights`` as the projections that read it must use them, once each.

    Args:
        reduce: starts the backward collective, on the gradient of the tensor inside.
        gather: starts the collective that makes the tensor inside from ``x``; ``None`` where it is ``x``.
        regather: gather once more in backward, for the weights' gradients, instead of keeping the result.
        early: start that gather with the gradient of the input; else with those of weights, which may come much later.
    """
    own = x.detach() if regather and gather is not None else None
    whole, *inside = _Enter.apply(x, gather, reduce, later, *weights)
    for each in later:
        each.deferred = True
    if own is not None and gather is not None:
        again, cast = Regather(gather, early, whole), autocasted(own)
        narrow = None if cast is own else (cast, Regather(gather, early))
        for each in later:
            each.own, each.regather, each.narrow = own, again, narrow
    return whole, inside


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, later: DeferredWeightGrad) -> Tensor:
    """Return ``x @ weight.T + bias`` (``x @ weight`` if it is stored transposed), ``[..., in]`` -> ``[..., out]``.

    ``x`` is kept for the gradient of the weight, unless it is the gathered tensor, which can be gathered again, or
    known to be derived from it: a block may compute something else first (a norm, a low-rank projection). Under
    autocast the product and the tensors kept for the backward pass are in its type, as in stock code; so is the second
    gather, unless something was derived from the first.
    """
    own, narrow, later.own, later.narrow = later.own, later.narrow, None, None  # autograd's saved tensors keep it
    derive = None if later.regather is None else later.regather.gives(x)
    if derive is None:
        own = later.regather = None
    elif derive is as_it_is and narrow is not None:
        own, later.regather = narrow
    if later.regather is not None and derive is not None:
        later.regather.readers += 1
        later.derive = derive
    x, bias = autocasted(x), None if bias is None else autocasted(bias)
    return _ColumnParallelLinear.apply(x, weight, bias, own, later)


def narrowed(reduce: Start, dtype: torch.dtype) -> Start:
    """Return ``reduce`` that sends 32-bit tensors in ``dtype``, with results in 32 bits again."""

    def start(grad: Tensor) -> Started:
        if grad.dtype != torch.float32:
            return reduce(grad)
        started = reduce(grad.to(dtype))
        return Started(None, lambda: started.result().to(grad.dtype))

    return start
