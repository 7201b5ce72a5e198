"""Split a backward pass into two halves: the gradient of a stage's input first, those of weights later (Qi et al.
2023).

Torch's functions for it are private and have been wrong: where a weight is used twice, and one use depends on the
other, some versions count a part of its gradient twice (pytorch#180952). They are tried on such a case before they are
used. Two errors of torch 2.13 are corrected here: a weight listed in two groups would be counted twice, and a hook on
an activation's gradient would run twice for the weights next to it.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..._compat.torch_pipelining import stage_backward_input, stage_backward_weight
from ...distributed.ops.head_cross_entropy import each_gradient_once

Split = list[dict[str, Any]]
"""What the second half needs: groups of weights, each with the graph's nodes next to them and the gradients there."""


def backward_of_input(
    output: Tensor, gradient: Tensor | None, given: Tensor, weights: Iterable[Any]
) -> Split:
    """Run the first half: add to ``given.grad``; ``gradient`` is that of ``output``, ``None`` for a scalar."""
    gradients: Any = None if gradient is None else [gradient]
    with each_gradient_once():
        return _merged(stage_backward_input([output], gradients, [given], iter(weights))[1])


def backward_of_weights(split: Split, weights: Iterable[Any]) -> None:
    """Run the second half: add to the ``.grad`` of the same weights."""
    with ExitStack() as hooks, each_gradient_once():
        for group in split:
            for node, gradients in zip(group["intermediates"], group["grads"], strict=True):
                # The recorded gradient has passed the activation's hooks already; they run again: replace the result.
                handle = node.register_prehook(lambda _, noted=gradients: noted)
                hooks.callback(handle.remove)
        # Where a module is used twice, groups go through the same part of the graph one after the other.
        stage_backward_weight(iter(weights), split, retain_graph=True)


def _merged(groups: Split) -> Split:
    """Merge groups that have a weight in common, and drop groups without gradients."""
    merged: Split = []
    for group in groups:
        if "grads" not in group:
            continue
        common = [other for other in merged if other["params"] & group["params"]]
        merged = [other for other in merged if not any(other is one for one in common)]
        nodes: dict[Any, Any] = {}
        for one in (*common, group):
            nodes.update(zip(one["intermediates"], one["grads"], strict=True))
        params = set().union(*(one["params"] for one in (*common, group)))
        merged.append(
            {"params": params, "intermediates": list(nodes), "grads": list(nodes.values())}
        )
    return merged


@cache
def splits_exactly() -> bool:
    """Return whether the two halves give the gradients of a full backward pass in this torch version."""
    names = ("given", "twice", "shared", "first", "second")
    leaves = {
        name: torch.linspace(0.5, 1.5 + index, 4, requires_grad=True)
        for index, name in enumerate(names)
    }

    def use() -> Tensor:
        once = leaves["given"] * leaves["twice"]
        both = once * leaves["twice"] + once.sin()
        return (
            (both * leaves["shared"] + leaves["first"])
            * (both.cos() * leaves["shared"] + leaves["second"])
        ).sum()

    weights = [leaf for name, leaf in leaves.items() if name != "given"]
    with torch.enable_grad():
        wanted = torch.autograd.grad(use(), list(leaves.values()))
        try:
            backward_of_weights(backward_of_input(use(), None, leaves["given"], weights), weights)
        except Exception:  # another torch may have other private functions
            return False
    gradients = [leaf.grad for leaf in leaves.values()]
    return all(
        grad is not None and torch.allclose(grad, want)
        for grad, want in zip(gradients, wanted, strict=True)
    )
