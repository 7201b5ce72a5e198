"""Average over the labels of all data ranks where only the model knows what its loss is a mean, or a sum, of.

Some losses consist of cross entropies, each a mean over the labels that it does not ignore: answers inside of their
rows, targets of speech, pixels, classes with weights, two heads. Ranks have different numbers of such labels, so the
mean of the ranks' means is not the mean over the batches of all ranks. What a model computes with its means is
therefore repeated on a shadow, whose gradient says how much each mean counts in the loss::

    mean of n labels --model--> loss            n, summed over all ranks: N
    shadow           --model--> shadow's loss --gradient w--> loss + w mean (ranks n / N - 1)

CTC losses are means over rows, or with ``ctc_loss_reduction="sum"`` sums: loss + w sum (ranks - 1).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.nn import functional

from ..._compat.replaced import attribute_replaced
from ..._compat.transformers.trainer import has_stock_loss
from .items_in_batch import was_used

_MOST_TERMS = 32  # of one loss; all ranks exchange equally many counts


class Tracked(Tensor):
    """Wrap a mean over labels, and what is computed with it; the same is computed with ``shadow``, with gradients even
    where there are none, in an evaluation.
    """

    shadow: Tensor

    @classmethod
    def wrap(cls, value: Tensor, shadow: Tensor) -> "Tracked":
        """Return ``value`` with its shadow."""
        made = value.as_subclass(cls)
        made.shadow = shadow
        return made

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute with the plain values, and once more with the shadows."""
        given = (tuple(args), dict(kwargs or {}))
        # first, because the plain values may change in place
        shadows = recursively_apply(_shadow_of, given)
        plain, options = recursively_apply(
            lambda value: value.as_subclass(Tensor), given, test_type=_is_tracked
        )
        result = function(*plain, **options)
        if not isinstance(result, Tensor):
            return result
        with torch.enable_grad():
            shadow = function(*shadows[0], **shadows[1])
        return cls.wrap(result, shadow)


def _is_tracked(value: Any) -> bool:
    return isinstance(value, Tracked)


def _shadow_of(value: Tensor) -> Tensor:
    return value.shadow if isinstance(value, Tracked) else value.detach().clone()


class _Means:
    """Compute cross entropies and CTC losses in the place of torch's functions, and remember those that are means over
    labels or rows, and sums over rows.
    """

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.leaves: list[Tensor] = []  # the beginnings of their shadows
        self.counts: list[Tensor | int] = []
        self.sums: list[int] = []  # which of the values are sums
        self._cross_entropy = functional.cross_entropy
        self._ctc_loss = functional.ctc_loss

    def cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the cross entropy like torch; but 0, not NaN, if it ignores all labels of this rank."""
        stock: Any = partial(
            self._cross_entropy,
            input,
            target,
            weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
        outdated = size_average is not None or reduce is not None
        # Of a mean over soft labels, the number of labels is not the divisor.
        if outdated or reduction != "mean" or target.is_floating_point():
            return stock(size_average=size_average, reduce=reduce, reduction=reduction)
        valid = target != ignore_index
        count = (valid if weight is None else weight[target.where(valid, 0)] * valid).sum()
        return self._followed(stock(reduction="sum") / count.where(count > 0, 1), count)

    def ctc_loss(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        """Return the CTC loss like torch."""
        lengths = (input_lengths, target_lengths)
        loss = self._ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)
        if reduction == "none":
            return loss
        rows = torch.as_tensor(input_lengths).numel()
        return self._followed(loss, rows if reduction == "mean" else None)

    def _followed(self, value: Tensor, count: Tensor | int | None) -> Tensor:
        """Remember a mean with the number, or weight, of its labels; a sum with ``None``."""
        if count is None:
            self.sums.append(len(self.values))
        leaf = value.detach().clone().requires_grad_()
        self.values.append(value)
        self.leaves.append(leaf)
        self.counts.append(1 if count is None else count)
        with torch.enable_grad():
            return Tracked.wrap(value, leaf.clone())

    def over_ranks(
        self, loss: Any, accelerator: Any, counts: bool, divided: bool
    ) -> tuple[Any, Any]:
        """Return a loss whose mean over the ranks is the loss over the labels of all ranks, and whether it consists
        of means or sums; collective. This rank's labels count if ``counts``. Trainer multiplies a loss that is
        ``divided`` by the labels of all ranks by the number of ranks.
        """
        found = isinstance(loss, Tracked) and len(self.values) <= _MOST_TERMS
        terms = len(self.values) if found else 0
        own = torch.zeros(2 + _MOST_TERMS, dtype=torch.float64, device=accelerator.device)
        own[0], own[1] = terms, terms**2
        for index in range(terms if counts else 0):
            own[2 + index] = self.counts[index]
        every = accelerator.reduce(own.clone(), "sum")
        ranks = accelerator.num_processes
        same = ranks * every[1] == every[0] ** 2  # true only if every rank has as many terms
        plain = loss.as_subclass(Tensor) if isinstance(loss, Tracked) else loss
        if not terms:
            return plain, False
        with torch.enable_grad():
            weights = torch.autograd.grad(loss.shadow.sum(), self.leaves, materialize_grads=True)
        totals = every[2:]
        totals[self.sums] = ranks if divided else 1
        # Where no label counts, the stock loss is NaN, which Trainer leaves out of an evaluation; training goes on.
        if torch.is_grad_enabled():
            totals = totals.where(totals > 0, 1)
        for mean, weight, share in zip(
            self.values, weights, ranks * own[2:] / totals, strict=False
        ):
            more = torch.where(same, share - 1, 0.0).to(mean.dtype)
            # An infinite CTC loss stays infinite.
            plain = plain + torch.where(more == 0, 0, weight * mean * more)
        return plain, same


@contextmanager
def means_over_ranks(trainer: Any, counts: bool = True) -> Iterator[list[Any]]:
    """Inside the ``with`` block, let a Trainer with a stock model's loss compute it from means over the labels of all
    data ranks; each rank's value and gradients are such that their mean over ranks is that of one process. Yield a list
    to which each loss appends whether it consists of such means, the same on every rank.

    Args:
        counts: whether this rank's labels count; not those of rows that only pad its batch.
    """
    averaged: list[Any] = []
    if not has_stock_loss(trainer):
        yield averaged
        return
    compute = trainer.compute_loss

    def over_ranks(model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        means = _Means()
        with (
            attribute_replaced(functional, "cross_entropy", means.cross_entropy),
            attribute_replaced(functional, "ctc_loss", means.ctc_loss),
        ):
            result = compute(model, inputs, return_outputs, **options)
        loss, outputs = result if return_outputs else (result, None)
        divided = was_used(options.get("num_items_in_batch"))
        loss, found = means.over_ranks(loss, trainer.accelerator, counts, divided)
        averaged.append(found)
        return (loss, outputs) if return_outputs else loss

    with attribute_replaced(trainer, "compute_loss", over_ranks):
        yield averaged
