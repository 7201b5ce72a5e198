"""Exchange tokens with their experts, differentiably.

::

    dispatch   x [n, h] ----> grouped [arrived, h]      backward   sum over a token's routes <---- the rows back
    combine    grouped  ----> y [n, h]                  backward   weighted rows to the experts <---- dy
               y[t] = sum over routes of weight * row, on the sender

Weights of routes are applied on the sender, so neither they nor their gradients are sent: four all-to-alls of ``h``
numbers per row, layer and step.

Experts see the tokens of several distinct batches. The data axes average gradients over all distinct batches, but those
of experts over fewer ranks or none: gradients are divided by the missing factor (``batches``) where they enter the
experts' backward pass, and multiplied by it again where they leave.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .routes import Routes


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes, batches: int) -> Tensor:
        ctx.routes, ctx.batches = routes, batches
        return routes.to_experts(x.index_select(0, routes.tokens))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = ctx.routes.sum_by_token(ctx.routes.from_experts(grads[0]))
        return total.mul_(ctx.batches) if ctx.batches > 1 else total, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped: Tensor, weights: Tensor, routes: Routes, batches: int) -> Tensor:
        rows = routes.from_experts(grouped)
        ctx.save_for_backward(rows, weights)
        ctx.routes, ctx.batches = routes, batches
        return routes.sum_by_token(rows, weights).to(grouped.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights = ctx.saved_tensors
        routes, back = ctx.routes, grads[0].index_select(0, ctx.routes.tokens)
        of_weights = None
        if ctx.needs_input_grad[1]:
            products = (rows * back).sum(-1, dtype=weights.dtype)
            of_weights = torch.zeros_like(weights).view(-1).index_copy_(0, routes.order, products).view_as(weights)
        if not ctx.needs_input_grad[0]:
            return None, of_weights, None, None
        scale = routes.taken(weights)
        scale = scale / ctx.batches if ctx.batches > 1 else scale
        return routes.to_experts((back * scale).to(rows.dtype)), of_weights, None, None


def dispatch(x: Tensor, routes: Routes, batches: int) -> Tensor:
    """Send this rank's tokens ``x [n, h]`` to their experts; return the rows ``[arrived, h]`` for this rank's experts.

    Args:
        batches: the number of distinct batches among the expert ranks.
    """
    return _Dispatch.apply(x, routes, batches)


def combine(grouped: Tensor, weights: Tensor, routes: Routes, batches: int) -> Tensor:
    """Send the experts' outputs ``[arrived, h]`` back, and sum them by token with ``weights [n, k]``: ``[n, h]``."""
    return _Combine.apply(grouped, weights, routes, batches)
