"""Enter a tensor-parallel region and overlap its backward collective with the projections' weight gradients.

The backward pass of a projection computes two products: the gradient of its input, which enters a collective, and the
gradient of its weight, for which no other rank waits. Stock PyTorch computes both in one node of the graph. Here they
are two nodes. Of the nodes that are ready, autograd runs the one created last, which gives this order::

    forward    await ---> weights W1 W2 ---> launch ---> projections 1, 2 ---> ...
    backward   projections 2, 1 (input gradients) -> launch: the collective starts -> W2, W1 -> await: it has ended

The products and their operands are the same as without overlap, so results are bitwise equal. The idea is Megatron-LM's
(``gradient_accumulation_fusion`` and the asynchronous all-reduce in its column-parallel layer; Shoeybi et al. 2019).
Megatron-LM overlaps inside one autograd node; here separate nodes overlap, so the projections stay modules of their
own. A backward pass in two halves (zero-bubble schedules) reaches each projection twice: its first half computes the
gradient of the input, its second half the gradient of the weight.

Adapters of a frozen projection have such a node too, one for all factors of a block (:class:`DeferredGradients`).

A projection whose products are not torch's own (8-bit products, for example) registers them with :func:`multiply_by`.
If these products exchange scales of gradients between ranks, ``launch`` computes the gradient of the input for all
projections that read it, after a single exchange for all of them.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
_FACTORS = "_hfscale_factors"

# Least size, in bytes, of a block's input with all tokens at which the collective is overlapped. Splitting projections
# into two nodes costs the CPU 0.4 ms per block. For smaller inputs there is less time to hide: GPUs sum 1 MiB in 0.01
# to 0.2 ms, and a layer with so few tokens is computed faster than its kernels are launched.
OVERLAPPED_FROM = 1 << 20
Start = Callable[[Tensor], Started]
Derive = Callable[[Tensor], Tensor]
"""Repeats on a gathered tensor ``[n, h]`` what the forward pass did to it: a cast to another dtype, or a dropout."""


class Products:
    """Compute the matrix products of one projection, forward and backward, by torch's own kernels; weights are
    ``[out, in]``.

    Subclasses compute the products in other ways (in 8 bits, for example), and may keep operands between the calls.
    Each forward pass has its own object.
    """

    # whether ``to_input`` needs values from other ranks, which :meth:`agree` exchanges
    agrees = False

    @staticmethod
    def agree(asked: Sequence[tuple[Any, Tensor]]) -> None:
        """Exchange with other ranks the values (scales, for example) that :meth:`to_input` needs, once for several
        pairs ``(products, grad [n, out])`` of projections.
        """

    def reads(self, x: Tensor, dtype: torch.dtype) -> None:
        """Take note of the projection's input before its cast to ``dtype``; projections that read the same input may
        share values computed from it, such as its scale.
        """

    def kept(self, weight: Tensor) -> Tensor:
        """Return the tensor that is saved for the backward pass instead of the weight; by default, the weight in the
        autocast dtype.
        """
        return autocasted_weight(weight)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the projection's output ``[..., out]`` for its input ``x [..., in]``."""
        return F.linear(x, weight, bias)

    def to_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input ``[n, in]``, given the gradient of the output, ``grad [n, out]``."""
        return grad.mm(weight)

    def to_weight(self, grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
        """Return the gradient of the weight, ``[out, in]`` or, if ``transposed``, ``[in, out]``.

        ``grad [n, out]`` is the gradient of the output, ``x [n, in]`` the input.
        """
        return x.t().mm(grad) if transposed else grad.t().mm(x)


def multiply_by(module: nn.Module, products: Callable[[], Products]) -> None:
    """Let the projection ``module`` compute by the :class:`Products` that ``products()`` makes for each pass.

    Deep copies of the module use the same constructor ``products``.
    """
    setattr(module, _ATTRIBUTE, products)


def multiplied_by(module: Any) -> Callable[[], Products]:
    """Return the constructor of the :class:`Products` of a projection, as set by :func:`multiply_by`; by default the
    class.
    """
    return module.__dict__.get(_ATTRIBUTE, Products)


class Regather:
    """All-gather a tensor again in the backward pass, for projections that read it or a tensor derived from it."""

    def __init__(self, gather: Start, whole: Tensor | None = None) -> None:
        self.gather = gather
        self.readers = 0
        self.left = 0
        self._known: list[tuple[weakref.ref[Tensor], int, Derive]] = []
        if whole is not None:
            self._know(whole, as_it_is)
        self._started: Started | None = None
        self._whole: Tensor | None = None
        self._pass = -1  # the number of the backward pass for which the tensor was gathered

    def gives(self, x: Tensor) -> Derive | None:
        """Return the function that computes ``x`` from the gathered tensor; ``None`` if ``x`` was not derived from that
        tensor, or has been modified since.
        """
        return next(
            (derive for known, version, derive in self._known if _is_still(x, known(), version)),
            None,
        )

    def made(self, x: Tensor, found: Tensor, derive: Derive) -> None:
        """Record that ``found`` is ``derive(x)``: if ``x`` comes from the gathered tensor, a projection that reads
        ``found`` computes it again in the backward pass instead of saving it.
        """
        before = self.gives(x)
        if before is not None:
            self._know(found, lambda whole: derive(before(whole)))

    def _know(self, x: Tensor, derive: Derive) -> None:
        self._known.append((weakref.ref(x), version_of(x), derive))

    def start(self, x: Tensor) -> None:
        """Start the all-gather of ``x``, unless another projection has started it in this backward pass."""
        current = backward_pass()
        if self._pass != current:
            self._pass, self._started, self._whole = current, self.gather(x), None

    def take(self) -> Tensor:
        """Return the gathered tensor as ``[n, h]``, and free it after the last projection that reads it has called
        this.
        """
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
    """Return ``x``; used as :data:`Derive` for an input that is the gathered tensor itself."""
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
    """Compute the gradient of a tensor-parallel block's input, in one step for all projections that read the input.

    The input tensor carries this object as an attribute, by which projections recognize the input.
    """

    shape: torch.Size  # shape of the input
    kind: dict[str, Any]  # dtype and device of the input

    def __init__(self) -> None:
        self.left: dict[
            Products, tuple[Tensor, Tensor]
        ] = {}  # per projection that has run backward: gradient of its output [n, out], weight [out, in]

    def to_input(self, total: Tensor | None) -> Tensor:
        """Return the gradient of the input: ``total``, from other readers of the input, plus all projections' terms,
        which are added in place.
        """
        left = self.left
        self.left = {}
        if asked := [(products, grad) for products, (grad, _) in left.items() if products.agrees]:
            asked[0][0].agree(asked)
        for products, (grad, weight) in left.items():
            term = products.to_input(grad, weight).view(self.shape).to(**self.kind)
            total = term if total is None else total.add_(term)
        return torch.zeros(self.shape, **self.kind) if total is None else total


class DeferredWeightGrad:
    """Compute the gradient of a projection's weight in an autograd node of its own, which runs while the collective on
    the input's gradient is under way.
    """

    def __init__(
        self, weight: Tensor, transposed: bool, products: Products, own: Tensor | None = None
    ) -> None:
        # transposed: whether the weight is stored as ``[in, out]``
        # products: computes the projection's matrix products
        # own: this rank's shard of the input, from which the input can be gathered again
        self.transposed = transposed
        self.products = products
        self.own = own
        # gathers ``own`` again in the backward pass; ``None`` if the input is saved instead
        self.regather: Regather | None = None
        # the shard in the autocast dtype, and the object that gathers this narrow shard
        self.narrow: tuple[Tensor, Regather] | None = None
        # how the projection's input is derived from the gathered tensor
        self.derive: Derive = as_it_is
        # the block's entry, if the projection reads the block's input
        self.entry: Entry | None = None
        # input [n, in] (``None`` if it is gathered again), and gradient of the output [n, out]
        self.operands: tuple[Tensor | None, Tensor] | None = None
        # the weight in the form that :func:`column_parallel_linear` must use, exactly once
        to_weight = partial(self._gradient, dtype=weight.dtype)
        self.token = apply_mapping(weight, None, to_weight, undefined=True)

    def _gradient(self, _: None, dtype: torch.dtype) -> Tensor:
        assert self.operands is not None  # the projection's own backward node runs before this one
        (x, grad), self.operands = self.operands, None
        if x is None:
            assert self.regather is not None
            x = self.derive(self.regather.take()).to(grad.dtype)
        return self.products.to_weight(grad, x, self.transposed).to(dtype)


class DeferredGradients:
    """Compute gradients of several tensors in one autograd node, like :class:`DeferredWeightGrad` for one weight.

    The tensors' tokens are used in their place. A token's user either returns its gradient, or returns ``None`` and
    leaves a function here that computes the gradient.
    """

    def __init__(self) -> None:
        self._left: dict[int, Callable[[], Tensor]] = {}

    def tokens_of(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return one token per tensor; call this only once."""
        return _Tokens.apply(self, *tensors)  # type: ignore[no-any-return]

    def leave(self, number: int, gradient: Callable[[], Tensor]) -> None:
        """Set the function that computes the gradient of token ``number``."""
        self._left[number] = gradient

    def take(self, number: int, gradient: Tensor | None) -> Tensor | None:
        """Compute the gradient of token ``number``; by default return ``gradient``."""
        left = self._left.pop(number, None)
        return gradient if left is None else left()


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, later: DeferredGradients, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.later = later
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(ctx.later.take(number, grad) for number, grad in enumerate(grads))


@dataclass
class FactorTokens:
    """Stand for an adapter's factors in one pass: values to compute with, whose gradients may be computed later."""

    values: tuple[Tensor, Tensor]
    number: int  # of the first factor's token; the second factor's follows
    later: DeferredGradients

    def __reduce__(self) -> Any:
        """Copy and pickle as ``None``: a copy of the module that has this as an attribute reads its own factors."""
        return type(None), ()


def set_factors(module: nn.Module, factors: FactorTokens | None) -> None:
    """Set what :func:`take_factors` returns."""
    module.__dict__[_FACTORS] = factors


def _give_tokens(factors: Sequence[tuple[nn.Module, Tensor, Tensor]]) -> None:
    if not factors:
        return
    gradients = DeferredGradients()
    tokens = gradients.tokens_of([each for _, *pair in factors for each in pair])
    for number, (module, *_) in enumerate(factors):
        first, second = tokens[2 * number : 2 * number + 2]
        set_factors(module, FactorTokens((first, second), 2 * number, gradients))


def take_factors(module: nn.Module) -> FactorTokens | None:
    """Return the factors that were set for the first factor's ``module``, once; ``None`` if none were set."""
    found: FactorTokens | None = module.__dict__.pop(_FACTORS, None)
    return found


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
        to_input = None
        input_asked, weight_asked, *_ = gradients_asked(ctx)
        if weight_asked:
            if later.regather is not None:
                later.regather.start(kept)
            later.operands = (
                None if later.regather else kept.reshape(-1, kept.shape[-1]),
                grad,
            )
        weight = weight.t() if later.transposed else weight
        if input_asked and later.entry is not None:
            later.entry.left[later.products] = grad, weight
        elif input_asked:
            to_input = later.products.to_input(grad, weight)
            to_input = to_input.view(*grads[0].shape[:-1], to_input.shape[-1])
        to_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return to_input, None, to_bias, None, None  # the weight's own node computes its gradient


def enter_overlapped(
    x: Tensor,
    weights: Sequence[tuple[Tensor, bool, Products]],
    reduce: Start,
    gather: Start | None = None,
    regather: bool = False,
    agrees: bool = False,
    factors: Sequence[tuple[nn.Module, Tensor, Tensor]] = (),
) -> tuple[Tensor, list[DeferredWeightGrad]]:
    """Return the input inside the region, and one :class:`DeferredWeightGrad` per weight that is multiplied with it.

    Args:
        x: the tensor that enters the region.
        weights: the weights of the projections that read the input; each with a flag whether it is stored transposed
            (``[in, out]``), and with the projection's products.
        reduce: starts the backward collective on the gradient of the input inside the region; may overwrite the
            gradient if there is no ``gather``.
        gather: starts the collective that makes the input inside the region from ``x``; ``None`` if the input is ``x``.
        regather: whether to gather again in the backward pass, for the gradients of the weights, instead of saving the
            gathered tensor.
        agrees: whether the products exchange values with other ranks for the gradient of the input; the exchange is
            then made once for all projections.
        factors: for each adapter in the region, the module of the first factor, which is given tokens of both factors
            (:func:`take_factors`), and both factors as their forward passes read them.
    """
    # flight: the started collective, between the nodes `launch` and `await`
    entry, flight = (
        Entry() if agrees else None,
        list[Started](),
    )

    def launch(by_others: Any) -> None:  # the `await` node returns the gradient
        flight.append(reduce(by_others if entry is None else entry.to_input(by_others)))

    x = apply_mapping(x, None, lambda _: flight.pop().result(), undefined=True)
    own = x.detach() if regather and gather is not None else None
    # Made before the launch node: autograd runs the ready node that was created last, so these run after the launch.
    later = [DeferredWeightGrad(*each, own) for each in weights]
    _give_tokens(factors)
    whole = apply_mapping(
        x,
        None if gather is None else lambda x: gather(x).result(),
        launch,
        undefined=agrees,
        overwrites=gather is None or agrees,
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
    """Return ``x @ weight.T + bias`` (``x @ weight`` if the weight is stored transposed), ``[..., in]`` ->
    ``[..., out]``; ``later`` has the weight, and computes its gradient in a separate autograd node.

    For this gradient ``x`` is saved, unless the backward pass can make ``x`` again: ``x`` is the tensor that
    :func:`enter_overlapped` gathered, or is known to be derived from it. Other inputs exist because a block may first
    compute something else (a norm, a low-rank projection). Under autocast, as in stock code, the product and the saved
    tensors are in the autocast dtype. The gather in the backward pass is in this dtype too, unless ``x`` was derived
    from the gathered tensor.
    """
    # autograd's saved tensors hold the shard from here on
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
    """Return ``x [..., in]`` as ``[n, in]``, with the Python attributes of ``x``, by which projections recognize their
    input.
    """
    return with_notes_of(x, x.reshape(-1, x.shape[-1]))


def with_notes_of(x: Tensor, view: Tensor) -> Tensor:
    """Return ``view``, a view of ``x``, after making it share the Python attributes of ``x``, by which projections
    recognize their input.
    """
    view.__dict__ = x.__dict__
    return view


def leaves_gradient(x: Tensor) -> bool:
    """Return whether ``x`` is a block's input whose gradient an :class:`Entry` computes, once for all projections."""
    return hasattr(x, _ENTRY)


def narrowed(reduce: Start, dtype: torch.dtype) -> Start:
    """Return a version of ``reduce``, which starts a collective, that sends float32 gradients in ``dtype`` and returns
    float32 results.
    """

    def start(grad: Tensor) -> Started:
        if grad.dtype != torch.float32:
            return reduce(grad)
        started = reduce(grad.to(dtype))
        return Started(None, lambda: started.result().to(grad.dtype))

    return start
