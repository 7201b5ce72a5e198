"""Head and cross entropy in one operator, over chunks of rows: the logits of all rows never exist at once.

::

    rows with a target --> chunk --> head --> logits [n, V/t] --> loss terms (one all-gather of [2, n])
                                                    |
       gradient of the hidden rows <-- head <-- gradient, written into the logits
       sums of the head's gradients <----+

The forward pass takes each chunk's gradients right after its loss, so that its logits are computed once and can be
dropped (Liger Kernel, Hsu et al. 2024); the backward pass multiplies the saved gradients by that of the loss. Memory:
one chunk of logits and the gradients themselves. Rows without a target are neither projected nor sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._compat.torch import backward_keeps_graph
from .head_rows import HeadRows
from .vocab_cross_entropy import RowTerms, Targets, VocabularySlice, compute_dtype

_CHUNK_ELEMENTS = 1 << 23  # logits of a chunk
_CHUNK_ELEMENTS_GPU = 1 << 26
# Fewer rows make the products slow: each chunk also reads the head's weight twice and its gradient once.
_FEWEST_ROWS = 128
_SMALL_ELEMENTS = 1 << 20  # fewer logits than these are not worth a chunk
_once: list[bool] = []  # not empty inside each_gradient_once; autograd's threads read it too
_CHUNKS = 4  # also where everything would fit, unless they had fewer rows; then two


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: tuple[Tensor | None, ...], expected: float, *inputs: Tensor
    ) -> Tensor:
        ctx.expected = expected
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = grads[0] if ctx.expected == 1 else grads[0] / ctx.expected
        return None, None, None, *(_times(saved, factor) for saved in ctx.saved_tensors)


@torch.no_grad()
def _loss_and_gradients(
    hidden: Tensor,  # [N, h]
    targets: Tensor,  # [N] global ids, or ignore_index
    scale: Tensor,  # scalar, of the type that sums are made in
    ignore_index: int,
    vocabulary: VocabularySlice,
    head: HeadRows,
    known: int | None,
    gradients: bool,
    expected: float,
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """Return the loss, its gradient by ``hidden`` and those by the head's parameters, both times ``expected``."""
    # Equal on all tensor ranks, and so are the chunks.
    valid = targets != ignore_index
    chosen = (valid.nonzero() if known is None else valid.nonzero_static(size=known)).squeeze(1)
    losses: list[Tensor] = []
    by_hidden = torch.zeros_like(hidden) if gradients and hidden.requires_grad else None
    step = rows_per_chunk(len(chosen), vocabulary.widest, hidden.device)
    places: list[Targets] = []
    for number, rows in enumerate(chosen.split(step) if len(chosen) else ()):
        logits = head.logits(hidden.index_select(0, rows), gradients)
        places = places or Targets.of(
            targets.index_select(0, chosen), vocabulary, logits.shape[1], known is not None
        ).split(step)
        terms = RowTerms(logits, places[number], vocabulary, keep=gradients)
        losses.append(terms.losses())
        if gradients:
            gradient = logits if head.reusable else torch.empty_like(logits)
            terms.gradient(logits, scale * expected, out=gradient)
            by_rows = head.backward(gradient)
            if by_hidden is not None and by_rows is not None:
                by_hidden.index_copy_(0, rows, by_rows)
            del gradient
        del logits, terms  # before the next ones are made
    total = torch.cat(losses).sum() * scale if losses else scale.new_zeros(())
    return total, by_hidden, tuple(head.sums()) if gradients else ()


@contextmanager
def each_gradient_once() -> Iterator[None]:
    """Promise inside the ``with`` block that no backward pass reaches a loss twice for the same gradients.

    :func:`_times` may then overwrite saved gradients even where the graph is kept.
    """
    _once.append(True)
    try:
        yield
    finally:
        _once.pop()


def _times(saved: Tensor | None, factor: Tensor) -> Tensor | None:
    """Return ``saved * factor``, in place where no second backward pass will read the saved tensor."""
    if saved is None:
        return None
    # Where the graph is not kept (or for other parts of it only), autograd lets go of what is saved right after this,
    # and makes it `.grad` as it is.
    if backward_keeps_graph() and not _once:
        return saved * factor.to(saved.dtype)
    if factor.device.type == "cpu" and factor == 1:  # asking a GPU would wait for it
        return saved
    return saved.mul_(factor)


def rows_per_chunk(rows: int, width: int, device: torch.device) -> int:
    """Return how many of ``rows`` a chunk holds, where a row has ``width`` logits."""
    budget = _CHUNK_ELEMENTS if device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    even = max(-(-rows // _CHUNKS), min(max(_FEWEST_ROWS, _SMALL_ELEMENTS // width), -(-rows // 2)))
    if device.type != "cpu":  # few different sizes: an allocator's pieces fit again, and products have even shapes
        even = -(-even // _FEWEST_ROWS) * _FEWEST_ROWS
    return max(1, min(max(_FEWEST_ROWS, budget // width), even))


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
) -> Tensor:
    """Return the sum of the cross entropies of rows whose target is not ``ignore_index``, divided by ``divisor``.

    Args:
        hidden: ``[N, h]``, equal on all tensor ranks; its gradient is partial: each rank has its slice's term.
        targets: ``[N]``, global token ids, equal on all ranks.
        head: maps rows to this rank's slice of the vocabulary.
        divisor: a scalar; by default the number of such rows, which makes it their mean.
        dtype: of the logits, where it is not that of ``hidden``.
        valid: how many rows have a target, where the host knows; otherwise it asks the device.
        expected: the gradient of the loss with which the backward pass will begin (a loss scale): gradients in 16 bits
            are taken of the loss times this.

    Returns:
        a scalar, float32 (float64 for float64 logits), equal on all ranks.
    """
    compute = compute_dtype(dtype or hidden.dtype)
    count = (targets != ignore_index).sum() if divisor is None else divisor
    scale = count.to(compute) if isinstance(count, Tensor) else targets.new_full((), count, dtype=compute)
    scale = scale.reciprocal() if scale.device == hidden.device else scale.to(hidden.device).reciprocal()
    trains = torch.is_grad_enabled() and (hidden.requires_grad or any(p.requires_grad for p in head.parameters))
    loss, by_hidden, by_head = _loss_and_gradients(
        hidden, targets, scale, ignore_index, vocabulary, head, valid, gradients=trains, expected=expected
    )
    if not trains:
        return loss
    # Apart, so that a backward pass for one of them leaves the other's alone (a stage's, in two halves).
    result = _WithGradients.apply(loss, (by_hidden,), expected, hidden)
    if head.parameters:
        result = result + _WithGradients.apply(torch.zeros_like(loss), by_head, expected, *head.parameters)
    return result  # type: ignore[no-any-return]
