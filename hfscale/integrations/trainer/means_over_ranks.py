"""Average over the labels of all data ranks where only the model knows what its loss is a mean of.

Some losses consist of cross entropies, each a mean over the labels that it does not ignore: answers inside of their
rows, targets of speech, pixels, two heads. Ranks have different numbers of such labels, so the mean of the ranks' means
is not the mean over the batches of all ranks. What a model computes with its means is therefore repeated on a shadow,
whose gradient says how much each mean counts in the loss::

    mean of n labels --model--> loss            n, summed over all ranks: N
    shadow           --model--> shadow's loss --gradient w--> loss + w mean (ranks n / N - 1)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.nn import functional

from ..._compat.replaced import attribute_replaced
from ..._compat.transformers.trainer import has_stock_loss

_MOST_TERMS = 8  # of one loss; all ranks exchange equally many counts


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
    """Compute cross entropies in the place of torch's function, and remember those that are means over labels."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.leaves: list[Tensor] = []  # the beginnings of their shadows
        self.counts: list[Tensor] = []
        self._stock = functional.cross_entropy

    def cross_entropy(
        self, input: Tensor, target: Tensor, *args: Any, ignore_index: int = -100, **options: Any
    ) -> Tensor:
        """Return the cross entropy like torch; but 0, not NaN, if it ignores all labels of this rank."""
        asked = {name: value for name, value in options.items() if value is not None}
        smoothing = asked.pop("label_smoothing", 0.0)
        # Of a weighted mean, or of one over soft labels, the number of labels is not the divisor.
        if args or asked.pop("reduction", "mean") != "mean" or asked or target.is_floating_point():
            return self._stock(input, target, *args, **{"ignore_index": ignore_index, **options})
        count = (target != ignore_index).sum()
        total = self._stock(
            input,
            target,
            ignore_index=ignore_index,
            reduction="sum",
            label_smoothing=smoothing,
        )
        mean = total / count.clamp(min=1)
        leaf = mean.detach().clone().requires_grad_()
        self.values.append(mean)
        self.leaves.append(leaf)
        self.counts.append(count)
        with torch.enable_grad():
            return Tracked.wrap(mean, leaf.clone())

    def over_ranks(self, loss: Any, accelerator: Any, counts: bool) -> tuple[Any, Any]:
        """Return a loss whose mean over the ranks is the loss over the labels of all ranks, and whether it consists
        of means; collective. This rank's labels count if ``counts``.
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
        # Where no label counts, the stock loss is NaN, which Trainer leaves out of an evaluation; training goes on.
        shares = ranks * own[2:] / every[2:].clamp(min=int(torch.is_grad_enabled()))
        for mean, weight, share in zip(self.values, weights, shares, strict=False):
            more = torch.where(same, share - 1, 0.0).to(mean.dtype)
            plain = plain + weight * mean * more
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
        with attribute_replaced(functional, "cross_entropy", means.cross_entropy):
            result = compute(model, inputs, return_outputs, **options)
        loss, outputs = result if return_outputs else (result, None)
        loss, found = means.over_ranks(loss, trainer.accelerator, counts)
        averaged.append(found)
        return (loss, outputs) if return_outputs else loss

    with attribute_replaced(trainer, "compute_loss", over_ranks):
        yield averaged
