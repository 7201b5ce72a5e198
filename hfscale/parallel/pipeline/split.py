"""Split a backward pass into two halves: first the gradient of a stage's input, later those of the weights (Qi et al.
2023).

torch's functions for this split are private, and some versions have a bug: if a weight is used twice, and one use
depends on the other, a part of the weight's gradient is counted twice (pytorch#180952). Therefore the functions are
tested on such a case before they are used. Two bugs of torch 2.13 are corrected here: a weight in two groups would be
counted twice, and a hook on an activation's gradient would run twice for the weights next to the activation.
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
"""Describes what the first half of a backward pass leaves for the second: groups of weights, each with the graph nodes
next to the weights and the nodes' gradients.
"""


def backward_of_input(
    output: Tensor, gradient: Tensor | None, given: Tensor, weights: Iterable[Any]
) -> Split:
    """Run the first half of a backward pass, which adds the gradient of the stage's input to ``given.grad``.

    ``gradient`` is the gradient of ``output``; ``None`` if the output is a scalar.
    """
    gradients: Any = None if gradient is None else [gradient]
    with each_gradient_once():
        return _merged(stage_backward_input([output], gradients, [given], iter(weights))[1])


def backward_of_weights(split: Split, weights: Iterable[Any]) -> None:
    """Run the second half of a backward pass, which adds the gradients of the weights to their ``.grad``."""
    with ExitStack() as hooks, each_gradient_once():
        for group in split:
            for node, gradients in zip(group["intermediates"], group["grads"], strict=True):
                # The recorded gradient has already passed the activation's hooks. They run again here, so their result
                # is replaced by the recorded gradient.
                handle = node.register_prehook(lambda _, noted=gradients: noted)
                hooks.callback(handle.remove)
        # retain_graph: if a module is used twice, several groups run through the same part of the graph.
        stage_backward_weight(iter(weights), split, retain_graph=True)


def _merged(groups: Split) -> Split:
    """Merge groups that have a weight in common, so that its gradient is counted once, and drop groups without
    gradients.
    """
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
    """Return whether, in this version of torch, a backward pass in two halves (input, then weights) gives the same
    gradients as an ordinary one.
    """
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
        except Exception:  # another version of torch may have other private functions
            return False
    gradients = [leaf.grad for leaf in leaves.values()]
    return all(
        grad is not None and torch.allclose(grad, want)
        for grad, want in zip(gradients, wanted, strict=True)
    )
