"""Enter a tensor-parallel region with the backward collective overlapped by its projections' weight gradients.

Backward through a projection makes two products: the gradient of its input, which the other ranks wait for, and that of
its weight, which nobody waits for. The stock graph has both in one node. Here they are two, and autograd, which runs
the youngest of the nodes that are ready, finds them in this order::

    forward    await ---> weights W1 W2 ---> launch ---> projections 1, 2 ---> ...
    backward   projections 2, 1 (input gradients) -> launch: the collective starts -> W2, W1 -> await: it has ended

The products are the same, on the same operands, so results are equal bit by bit. The idea is Megatron-LM's
(``gradient_accumulation_fusion`` and asynchronous all-reduce in its column-parallel layer; Shoeybi et al. 2019), put
into the graph instead of one node, so that the projections stay modules of their own. A backward pass in two halves
(zero-bubble schedules) comes to a projection in both: to the node of its input behind it in the first, of its weight in
the second.

A projection with products other than torch's own (in 8 bits, say) registers them by :func:`multiply_by`. Where those
ask other ranks for scales of gradients, ``launch`` makes the gradient of the input for all projections that read it,
after one question for all.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..._compat.torch import backward_pass, gradients_asked, version_of
from .collectives import Started, apply_mapping
from .shared_casts import autocasted, autocasted_weight

_ATTRIBUTE = "_hfscale_products"
_ENTRY = "_hfscale_entry"

# Bytes of a block's input with all tokens. Taking projections apart costs the host 0.4 ms a block, and to hide is less:
# GPUs sum 1 MiB in 0.01 to 0.2 ms, while a layer of so few tokens is computed faster than it is launched.
OVERLAPPED_FROM = 1 << 20
Start = Callable[[Tensor], Started]
Derive = Callable[[Tensor], Tensor]
"""Derives from a gathered tensor ``[n, h]`` what the forward pass made of it: another type, or with entries dropped."""


class Products:
    """Compute a projection's products with torch, for one pass, keeping operands; weights are ``[out, in]``."""

    agrees = False  # whether ``to_input`` needs what other ranks know

    @staticmethod
    def agree(asked: Sequence[tuple[Any, Tensor]]) -> None:
        """Ask other ranks what the products of several ``(products, grad [n, out])`` need, before ``to_input``."""

    def reads(self, x: Tensor, dtype: torch.dtype) -> None:
        """Take note of the input, which other projections may read too, before it is cast to ``dtype``."""

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
    """Set what computes a projection's products in each pass, which deep copies of the module may share."""
    setattr(module, _ATTRIBUTE, products)


def multiplied_by(module: Any) -> Callable[[], Products]:
    """Return what :func:`multiply_by` set, or torch's own."""
    return module.__dict__.get(_ATTRIBUTE, Products)


class Regather:
    """Gather a tensor again in the backward pass, for projections that read it or a tensor derived from it."""

    def __init__(self, gather: Start, whole: Tensor | None = None) -> None:
        self.gather = gather
        self.readers = 0
        self.left = 0
        self._known: list[tuple[weakref.ref[Tensor], int, Derive]] = []
        if whole is not None:
            self._know(whole, as_it_is)
        self._started: Started | None = None
        self._whole: Tensor | None = None
        self._pass = -1  # the backward pass it was gathered for

    def gives(self, x: Tensor) -> Derive | None:
        """Return how ``x`` is derived from the gathered tensor; ``None`` if it is not, or was changed since."""
        return next(
            (derive for known, version, derive in self._known if _is_still(x, known(), version)),
            None,
        )

    def made(self, x: Tensor, found: Tensor, derive: Derive) -> None:
        """Record that ``found`` was derived from ``x``: a projection that reads ``found`` need not keep it either."""
        before = self.gives(x)
        if before is not None:
            self._know(found, lambda whole: derive(before(whole)))

    def _know(self, x: Tensor, derive: Derive) -> None:
        self._known.append((weakref.ref(x), version_of(x), derive))

    def start(self, x: Tensor) -> None:
        """Start the gather, unless another reader in this backward pass has started it."""
        current = backward_pass()
        if self._pass != current:
            self._pass, self._started, self._whole = current, self.gather(x), None

    def take(self) -> Tensor:
        """Return the gathered tensor as ``[n, h]``, and drop it with the last reader."""
        if self._started is not None:
            gathered = self._started.result()
            self._whole = gathered.reshape(-1, gathered.shape[-1])
            self._started = None
            self.left = self.readers
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
    same = (
        x.data_ptr() == known.data_ptr()
        and x.numel() == known.numel()
        and x.shape[-1] == known.shape[-1]
    )
    return x is known or (
        same and x.dtype == known.dtype and x.is_contiguous() and known.is_contiguous()
    )


class Entry:
    """Compute the gradient of a block's input for all projections that read that very tensor, which carries this."""

    shape: torch.Size  # of the input
    kind: dict[str, Any]  # its dtype and device

    def __init__(self) -> None:
        self.left: dict[
            Products, tuple[Tensor, Tensor]
        ] = {}  # d output [n, out] and weight [out, in]

    def to_input(self, total: Tensor | None) -> Tensor:
        """Return the gradient of the input: ``total`` by other readers, and by the projections as they came."""
        left = self.left
        self.left = {}
        if asked := [(products, grad) for products, (grad, _) in left.items() if products.agrees]:
            asked[0][0].agree(asked)
        for products, (grad, weight) in left.items():
            term = products.to_input(grad, weight).view(self.shape).to(**self.kind)
            total = term if total is None else total + term
        return torch.zeros(self.shape, **self.kind) if total is None else total


class DeferredWeightGrad:
    """A weight whose gradient is computed apart from its projection's: see :func:`enter_overlapped`."""

    def __init__(
        self, weight: Tensor, transposed: bool, products: Products, own: Tensor | None = None
    ) -> None:
        # products: computes the projection's matrix products
        self.transposed = transposed
        self.products = products
        self.own = own
        # gathers ``own``, this rank's shard of the input, again; ``None`` where the input is kept
        self.regather: Regather | None = None
        # The shard in autocast's type, and the gather of it.
        self.narrow: tuple[Tensor, Regather] | None = None
        self.derive: Derive = as_it_is
        self.entry: Entry | None = None  # of the block, if its input is what the projection reads
        # Input [n, in] (None: regathered), d output [n, out].
        self.operands: tuple[Tensor | None, Tensor] | None = None
        # the weight, as the projection must use it: by :func:`column_parallel_linear`, once
        to_weight = partial(self._gradient, dtype=weight.dtype)
        self.token = apply_mapping(weight, lambda weight: weight.view_as(weight), to_weight)

    def _gradient(self, _: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.operands is not None  # the projection's backward pass comes first
        (x, grad), self.operands = self.operands, None
        if x is None:
            assert self.regather is not None
            x = self.derive(self.regather.take()).to(grad.dtype)
        return self.products.to_weight(grad, x, self.transposed).to(dtype)


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token: Tensor,
        bias: Tensor | None,
        own: Tensor | None,
        later: Any,
    ) -> Tensor:
        ctx.later = later
        ctx.dtype = token.dtype
        weight = later.products.kept(token)
        kept = x if own is None else own
        ctx.save_for_backward(weight, kept if ctx.needs_input_grad[1] else None)
        return later.products.output(x, weight.t() if later.transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        weight, kept = ctx.saved_tensors
        later = ctx.later
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        to_input = to_weight = None
        input_asked, weight_asked, *_ = gradients_asked(ctx)
        if weight_asked:
            if later.regather is not None:
                later.regather.start(kept)
            later.operands = (
                None if later.regather else kept.reshape(-1, kept.shape[-1]),
                grad,
            )
            # Autograd needs something of the right shape to get to the weight's own node.
            to_weight = grad.new_zeros((), dtype=ctx.dtype).expand(weight.shape)
        weight = weight.t() if later.transposed else weight
        if input_asked and later.entry is not None:
            later.entry.left[later.products] = grad, weight
        elif input_asked:
            to_input = later.products.to_input(grad, weight)
            to_input = to_input.view(*grads[0].shape[:-1], to_input.shape[-1])
        to_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return to_input, to_weight, to_bias, None, None


def enter_overlapped(
    x: Tensor,
    weights: Sequence[tuple[Tensor, bool, Products]],
    reduce: Start,
    gather: Start | None = None,
    regather: bool = False,
    agrees: bool = False,
) -> tuple[Tensor, list[DeferredWeightGrad]]:
    """Return ``x`` inside the region, and the weights of the projections that read it.

    Args:
        weights: each with whether it is stored transposed, ``[in, out]``, and its products.
        reduce: starts the backward collective, on the gradient of the tensor inside.
        gather: starts the collective that makes the tensor inside from ``x``; ``None`` where it is ``x``.
        regather: gather once more in backward, for the weights' gradients, instead of keeping the result.
        agrees: whether products ask other ranks for what the gradient of the input needs: then once for all.
    """
    # The collective between its launch and its wait.
    entry, flight = (
        Entry() if agrees else None,
        list[Started](),
    )

    def launch(by_others: Any) -> Tensor:
        grad = by_others if entry is None else entry.to_input(by_others)
        flight.append(reduce(grad))
        # The gradient itself comes out of `await`; autograd only needs something of the right shape to get there.
        return grad.new_zeros(()).expand(shape)

    x, shape = (
        apply_mapping(
            x,
            lambda x: x.view_as(x),
            lambda _: flight.pop().result(),
        ),
        x.shape,
    )
    own = x.detach() if regather and gather is not None else None
    # Made before the launch, so that autograd, which runs the youngest ready node, comes to them after it.
    later = [DeferredWeightGrad(*each, own) for each in weights]
    whole = apply_mapping(
        x, lambda x: x.view_as(x) if gather is None else gather(x).result(), launch, agrees
    )
    if entry is not None:
        entry.shape = whole.shape
        entry.kind = {"dtype": whole.dtype, "device": whole.device}
        setattr(whole, _ENTRY, (entry, version_of(whole)))
    if own is not None and gather is not None:
        again = Regather(gather, whole)
        cast = autocasted(own)
        narrow = None if cast is own else (cast, Regather(gather))
        for each in later:
            each.regather = again
            each.narrow = narrow
    return whole, later


def column_parallel_linear(x: Tensor, later: DeferredWeightGrad, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` (``x @ weight`` if it is stored transposed), ``[..., in]`` -> ``[..., out]``.

    ``x`` is kept for the gradient of the weight, unless it is the gathered tensor, which can be gathered again, or
    known to be derived from it: a block may compute something else first (a norm, a low-rank projection). Under
    autocast the product and the tensors kept for the backward pass are in its type, as in stock code; so is the second
    gather, unless something was derived from the first.
    """
    # autograd's saved tensors keep it
    own = later.own
    narrow = later.narrow
    later.own = None
    later.narrow = None
    derive = None if later.regather is None else later.regather.gives(x)
    if derive is None:
        own = later.regather = None
    elif derive is as_it_is and narrow is not None:
        own, later.regather = narrow
    if later.regather is not None and derive is not None:
        later.regather.readers += 1
        later.derive = derive
    entry, version = getattr(x, _ENTRY, (None, -1))
    if entry is not None and version == version_of(x):
        later.entry = entry
    cast = autocasted(x)
    bias = None if bias is None else autocasted(bias)
    later.products.reads(x, cast.dtype)
    return _ColumnParallelLinear.apply(cast, later.token, bias, own, later)


def as_rows(x: Tensor) -> Tensor:
    """Return ``x [..., in]`` as ``[n, in]``, with all that projections have noted of it, or will note."""
    return with_notes_of(x, x.reshape(-1, x.shape[-1]))


def with_notes_of(x: Tensor, view: Tensor) -> Tensor:
    """Return a view of ``x`` that has, and shares, the attributes of ``x``."""
    view.__dict__ = x.__dict__
    return view


def leaves_gradient(x: Tensor) -> bool:
    """Return whether the gradient of ``x`` is computed where the block begins, for all projections that read it."""
    return hasattr(x, _ENTRY)


def narrowed(reduce: Start, dtype: torch.dtype) -> Start:
    """Return ``reduce`` that sends 32-bit tensors in ``dtype``, with results in 32 bits again."""

    def start(grad: Tensor) -> Started:
        if grad.dtype != torch.float32:
            return reduce(grad)
        started = reduce(grad.to(dtype))
        return Started(None, lambda: started.result().to(grad.dtype))

    return start
