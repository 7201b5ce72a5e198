"""A backward pass in two halves: the gradient of a stage's input first, those of its weights later (Qi et al. 2023).

Torch's functions for it are private and have been wrong: where a weight is used twice, and one use depends on the
other, some versions count a part of its gradient twice (pytorch#180952). They are tried on such a case before they are
used.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

Split = list[dict[str, Any]]
"""What the second half needs."""


def backward_of_input(output: Tensor, gradient: Tensor | None, given: Tensor, weights: Iterable[Any]) -> Split:
    """The first half: adds to ``given.grad``; ``gradient`` is of ``output``, ``None`` for a scalar."""
    gradients: Any = None if gradient is None else [gradient]
    return stage_backward_input([output], gradients, [given], iter(weights))[1]


def backward_of_weights(split: Split, weights: Iterable[Any]) -> None:
    """The second half: adds to the ``.grad`` of the same weights."""
    # Groups of weights with uses in common go through the same part of the graph, one after the other.
    stage_backward_weight(iter(weights), split, retain_graph=True)


@cache
def splits_exactly() -> bool:
    """Whether this torch's halves make the gradients of the whole, tried on a weight with two uses in a row."""
    weight = torch.tensor([3.0, 5.0], requires_grad=True)
    given = torch.tensor([2.0, 7.0], requires_grad=True)

    def use() -> Tensor:
        once = given * weight
        return (once * weight + once.sin()).sum()

    with torch.enable_grad():
        wanted = torch.autograd.grad(use(), [given, weight])
        try:
            backward_of_weights(backward_of_input(use(), None, given, [weight]), [weight])
        except Exception:  # a version with other private functions
            return False
    found = (given.grad, weight.grad)
    return all(grad is not None and torch.allclose(grad, want) for grad, want in zip(found, wanted, strict=True))
