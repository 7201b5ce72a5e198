"""Compute head and cross entropy in one operator, chunk by chunk, so that the logits of all rows never exist at once.

A row is one token position: a hidden state of size ``h``, or its ``V`` logits, sharded over ``t`` tensor ranks::

    rows with a target --> chunk --> head --> logits [n, V/t] --> loss terms (one all-gather of [2, n] numbers)
                                                    |
       gradient of the hidden rows <-- head <-- gradient, in the memory of the logits
       sums of the head's gradients <----+

The forward pass computes each chunk's gradients right after its loss, so the chunk's logits are computed once and can
be dropped (Liger Kernel, Hsu et al. 2024). The backward pass multiplies the saved gradients by the gradient of the
loss. The operator needs memory for one chunk of logits and for the gradients. Rows without a target are neither
projected nor sent.

A head is anything that maps ``[n, h]`` to ``[n, V/t]`` row by row (:class:`HeadRows`). The gradient of each head
parameter is a sum over rows, in one buffer; the gradients of the rows are returned chunk by chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..._compat.torch import backward_keeps_graph
from .vocab_cross_entropy import RowTerms, Targets, VocabularySlice, compute_dtype

if TYPE_CHECKING:  # imported only with a teacher
    from .divergence import DivergenceTerms, TaughtRows

Pointwise = Callable[[Tensor], Tensor]

# entries of a low-precision product that are added to a float32 sum at once
_SLICE_ELEMENTS = 1 << 24
_CHUNK_ELEMENTS = 1 << 23  # logits of a chunk
# Larger chunks on a GPU: in each chunk, the product that adds to the weight's gradient reads and writes all of it.
_CHUNK_ELEMENTS_GPU = 1 << 28
# Least rows of a chunk: each chunk also reads the head's weight twice and its gradient once, which few rows make slow.
_FEWEST_ROWS = 128
_SMALL_ELEMENTS = 1 << 20  # fewest logits of a chunk, unless all rows would be one chunk
# not empty inside each_gradient_once; a list, because autograd's threads read it too
_once: list[bool] = []
# number of chunks if all rows would fit into one chunk; two if four chunks would have too few rows
_CHUNKS = 4


class HeadRows:
    """Base class that runs the language model's head on a chunk of rows, forward and backward, for
    :func:`hfscale.distributed.ops.head_cross_entropy`.
    """

    reusable = False  # whether the gradient may be written into the memory of the last logits

    def __init__(
        self, parameters: Sequence[Tensor], finish: Pointwise | None, needed: bool
    ) -> None:
        # finish: the model's pointwise operations on the logits (a softcap, a scale); ``None`` if it has none
        # needed: whether the gradient of the rows is needed
        self.parameters = parameters
        self.finish = finish
        self.needed = needed
        self._sums = list(map(_Sum, parameters))
        self._kept: tuple[Any, ...] = ()

    def logits(self, rows: Tensor, gradients: bool) -> Tensor:
        """Return this rank's logits ``[n, V/t]`` of rows ``[n, h]``, without an autograd graph; the vocabulary of ``V``
        tokens is sharded over ``t`` ranks.

        With ``gradients``, save what the following call of :meth:`backward` needs.
        """
        raise NotImplementedError

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the rows ``[n, h]`` of the last :meth:`logits`, given the ``gradient`` of those logits
        ``[n, V/t]``; ``None`` if the rows need no gradient.

        The gradients of the head's parameters are added up over all calls, and returned by :meth:`sums`.
        """
        raise NotImplementedError

    def sums(self) -> list[Tensor | None]:
        """Return the gradient of each parameter of the head, summed over all chunks of rows; ``None`` for a frozen
        parameter.
        """
        return list(map(_Sum.total, self._sums))


class LinearRows(HeadRows):
    """Run a plain ``nn.Linear`` head by matrix products.

    ``reusable`` allows the gradient to overwrite the logits; it must be false if ``finish``, the model's pointwise
    operations on the logits, saves its result for its own gradient.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        finish: Pointwise | None,
        reusable: bool,
        needed: bool,
    ) -> None:
        super().__init__([weight] if bias is None else [weight, bias], finish, needed)
        self.weight = weight
        self.bias = bias
        self.reusable = reusable

    def logits(self, rows: Tensor, gradients: bool) -> Tensor:
        """Return this rank's logits ``[n, V/t]`` of rows ``[n, h]``; with ``gradients``, save what :meth:`backward`
        needs.
        """
        raw = F.linear(rows, self.weight, self.bias)
        if self.finish is None:
            self._kept = (rows, None, None)
            return raw
        with torch.set_grad_enabled(gradients):
            final = self.finish(raw.requires_grad_(gradients))
        self._kept = (rows, raw, final) if gradients else ()
        return final.detach()

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the rows ``[n, h]``, and add the rows' terms to the gradients of the weight and the
        bias.
        """
        (rows, raw, final), self._kept = self._kept, ()
        if self.finish is not None:
            (gradient,) = torch.autograd.grad(final, raw, gradient)
        self._sums[0].add_product(gradient, rows)
        if self.bias is not None:
            self._sums[1].add(gradient.sum(0))
        return gradient @ self.weight if self.needed else None


class AnyRows(HeadRows):
    """Run any other head (with adapters, quantized, under autocast) with gradients from autograd.

    Such a head may save its logits for the backward pass, so their memory is not reused.
    """

    def __init__(
        self, head: Pointwise, parameters: Sequence[Tensor], finish: Pointwise | None, needed: bool
    ) -> None:
        super().__init__(parameters, finish, needed)
        self.head = head

    def logits(self, rows: Tensor, gradients: bool) -> Tensor:
        """Return this rank's logits ``[n, V/t]`` of rows ``[n, h]``; with ``gradients``, keep their graph for
        :meth:`backward`.
        """
        with torch.set_grad_enabled(gradients):
            final = self.head(rows.requires_grad_(gradients and self.needed))
            if self.finish is not None:
                final = self.finish(final)
        self._kept = (rows, final) if gradients else ()
        return final.detach()

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the rows ``[n, h]``, and add the rows' terms to the gradients of the head's
        parameters.
        """
        (rows, final), self._kept = self._kept, ()
        trained = [each for each in self._sums if each.trains]
        inputs = [each.parameter for each in trained] + [rows] * self.needed
        gradients = list(torch.autograd.grad(final, inputs, gradient, allow_unused=True))
        by_rows = gradients.pop() if self.needed else None
        for each, part in zip(trained, gradients, strict=True):
            if part is not None:
                each.add(part)
        return by_rows


class _Sum:
    """Sum the gradient of one head parameter over chunks of rows, in float32 or float64: a 16-bit sum would be rounded
    after each chunk.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.trains = parameter.requires_grad
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
            # beta=0: the uninitialized buffer is not read.
            self._total.addmm_(gradient.T, rows, beta=0 if first else 1)
            return
        # GPUs have a kernel that adds 16-bit products to a float32 sum; CPUs have none.
        if rows.is_cuda and self._total.dtype == torch.float32:
            torch.addmm(
                self._total, gradient.T, rows, out_dtype=torch.float32, beta=0 if first else 1, out=self._total
            )  # fmt: skip
            return
        step = max(1, _SLICE_ELEMENTS // rows.shape[1])
        for i in range(0, gradient.shape[1], step):
            part = gradient[:, i : i + step].T @ rows
            self._total[i : i + step].copy_(part) if first else self._total[i : i + step].add_(part)

    def total(self) -> Tensor | None:
        if not self.trains:
            return None
        return (
            torch.zeros_like(self.parameter)
            if self._total is None
            else self._total.to(self.parameter.dtype)
        )

    def _buffer(self) -> Tensor:
        dtype = torch.promote_types(self.parameter.dtype, torch.float32)
        return torch.empty_like(self.parameter, dtype=dtype, memory_format=torch.contiguous_format)


class _WithGradients(torch.autograd.Function):
    """Autograd function whose backward pass only multiplies gradients that were computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        gradients: tuple[Tensor | None, ...],
        expected: float,
        of_head: bool,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.expected = expected
        ctx.of_head = of_head
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = grads[0] if ctx.expected == 1 else grads[0] / ctx.expected
        # The second half of a split backward pass runs through the rows' node again if a tied weight is read below it.
        keeps = backward_keeps_graph() and not (_once and ctx.of_head)
        return None, None, None, None, *_times(ctx.saved_tensors, factor, keeps)


@torch.no_grad()
def _loss_and_gradients(
    hidden: Tensor,  # [N, h]
    targets: Tensor,  # [N] global ids, or ignore_index
    scale: Tensor,  # scalar, in the dtype of the sums
    ignore_index: int,
    vocabulary: VocabularySlice,
    head: HeadRows,
    known: int | None,
    gradients: bool,
    expected: float,
    hits: Tensor | None,
    teacher: "TaughtRows | None",
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """Return the loss, its gradient by ``hidden``, and its gradients by the head's parameters.

    The gradients are those of the loss times ``expected`` (a loss scale, so that 16-bit gradients do not underflow).
    """
    # The rows with a target are equal on all tensor ranks, and so are the chunks.
    valid = targets != ignore_index
    chosen = (valid.nonzero() if known is None else valid.nonzero_static(size=known)).squeeze(1)
    losses: list[Tensor] = []
    by_hidden = torch.zeros_like(hidden) if gradients and hidden.requires_grad else None
    step = rows_per_chunk(
        len(chosen), vocabulary.widest * (1 + (teacher is not None)), hidden.device
    )
    places: list[Targets] = []
    for number, rows in enumerate(chosen.split(step) if len(chosen) else ()):
        logits = head.logits(hidden.index_select(0, rows), gradients)
        places = places or Targets.of_slice(
            targets.index_select(0, chosen), vocabulary, logits.shape[1], known is not None
        ).split(step)
        terms: RowTerms | DivergenceTerms
        if teacher is None:
            terms = RowTerms(logits, places[number], vocabulary)
        else:
            terms = teacher.terms(logits, rows, vocabulary)
        losses.append(terms.losses())
        if hits is not None and isinstance(terms, RowTerms):
            hits.index_copy_(0, rows, terms.hits(logits))
        if gradients:
            gradient = terms.gradient(logits, scale * expected, reuse=head.reusable)
            by_rows = head.backward(gradient)
            if by_hidden is not None and by_rows is not None:
                by_hidden.index_copy_(0, rows, by_rows)
            del gradient
        del logits, terms  # free the memory before the next chunk
    total = torch.cat(losses).sum() * scale if losses else scale.new_zeros(())
    return total, by_hidden, tuple(head.sums()) if gradients else ()


@contextmanager
def each_gradient_once() -> Iterator[None]:
    """Declare that no loss has two backward passes for its head inside the ``with`` block, so that the backward pass
    may overwrite the saved gradients of the head.
    """
    _once.append(True)
    try:
        yield
    finally:
        _once.pop()


def _times(saved: Sequence[Tensor | None], factor: Tensor, keeps: bool) -> list[Tensor | None]:
    """Return ``saved * factor``, computed in place unless autograd ``keeps`` the saved tensors for a second backward
    pass.
    """
    # Otherwise autograd frees the saved tensors right after this call, and the returned tensor becomes `.grad` without
    # a copy.
    products: list[Tensor | None] = []
    # reading a number from a GPU would wait for the GPU
    unchanged = not keeps and factor.device.type == "cpu" and bool(factor == 1)
    for tensor in saved:
        if tensor is None or unchanged:
            products.append(tensor)
        elif keeps:
            products.append(tensor * factor.to(tensor.dtype))
        else:
            products.append(tensor.mul_(factor))
    return products


def rows_per_chunk(rows: int, width: int, device: torch.device) -> int:
    """Return how many of the ``rows`` form one chunk, whose logits (``width`` per row) are in memory together."""
    budget = _CHUNK_ELEMENTS if device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    most = max(_FEWEST_ROWS, budget // width)
    even = max(
        -(-rows // _CHUNKS),
        min(max(_FEWEST_ROWS, _SMALL_ELEMENTS // width), -(-rows // 2)),
    )
    # Rounded to few different sizes, so that the allocator can reuse its blocks and products have even shapes.
    if device.type != "cpu":
        even = -(-even // _FEWEST_ROWS) * _FEWEST_ROWS
        most -= most % _FEWEST_ROWS
    return max(1, min(most, even))


def head_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    head: HeadRows,
    *,
    vocabulary: VocabularySlice,
    divisor: Tensor | int | None = None,
    ignore_index: int = -100,
    dtype: torch.dtype | None = None,
    valid: int | None = None,
    expected: float = 1.0,
    hits: Tensor | None = None,
    teacher: "TaughtRows | None" = None,
) -> Tensor:
    """Return the sum of the cross entropies of rows whose target is not ``ignore_index``, divided by ``divisor``: a
    scalar, float32 (float64 for float64 logits), equal on all ranks.

    Args:
        hidden: ``[N, h]``, equal on all tensor ranks. Its gradient is partial: each rank has the term of its slice of
            the vocabulary.
        targets: ``[N]``, global token ids, equal on all ranks. Rows with ``ignore_index`` have no target.
        head: computes this rank's logits of some rows.
        vocabulary: this rank's slice of the vocabulary.
        divisor: a scalar; by default the number of rows with a target, so that the result is the mean over these rows.
        dtype: dtype of the logits; by default that of ``hidden``.
        valid: number of rows with a target, if the CPU knows it; otherwise it is read from the device.
        expected: the loss scale: the gradient of the loss with which the backward pass will begin. Gradients in 16 bits
            are computed for the loss multiplied by this number.
        hits: an output, ``[N]`` of bool: for each row with a target, whether no logit is larger than the target's.
        teacher: rows of a teacher model. The loss of a row with a target is then the divergence from the teacher's
            distribution in this row; cannot be used with ``hits``.
    """
    compute = compute_dtype(dtype or hidden.dtype)
    count = (targets != ignore_index).sum() if divisor is None else divisor
    scale = (
        count.to(compute)
        if isinstance(count, Tensor)
        else targets.new_full((), count, dtype=compute)
    )
    scale = scale.to(hidden.device).reciprocal()
    trains = torch.is_grad_enabled() and (
        hidden.requires_grad or any(p.requires_grad for p in head.parameters)
    )
    loss, by_hidden, by_head = _loss_and_gradients(
        hidden,
        targets,
        scale,
        ignore_index,
        vocabulary,
        head,
        valid,
        trains,
        expected,
        hits,
        teacher,
    )
    if not trains:
        return loss
    # Two nodes, so that a backward pass for one of the two gradients leaves the other alone (a stage's split backward).
    result = _WithGradients.apply(loss, (by_hidden,), expected, False, hidden)
    if head.parameters:
        result = result + _WithGradients.apply(
            torch.zeros_like(loss), by_head, expected, True, *head.parameters
        )
    return result  # type: ignore[no-any-return]
