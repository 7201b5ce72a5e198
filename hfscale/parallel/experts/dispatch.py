"""Send tokens to their experts and back, differentiably. Planning this takes one sort and one copy to the host.

Below, a *route* is the assignment of one token to one expert. Data flow of ``n`` tokens with ``k`` routes each, and
``e`` experts, ``e/r`` on each of ``r`` ranks::

    sender     [n, h] --take the token of each route, sorted by expert--> [routes, h]
               --all-to-all--> expert's rank [arrived, h], by sender --regroup--> by expert

Outputs of experts return by the same steps in reverse. A route whose expert index is ``e`` is dropped: it is not sent,
and adds nothing to its token's output.

::

    dispatch   x [n, h] ----> grouped [arrived, h]      backward   sum over a token's routes <---- the rows back
    combine    grouped  ----> y [n, h]                  backward   weighted rows to the experts <---- dy
               y[t] = sum over routes of weight * row, on the sender

Weights of routes are applied on the sender, so neither weights nor their gradients are sent. A layer's step takes four
all-to-alls of ``h`` numbers per row.

The experts of a rank compute the tokens of several data ranks, whose batches differ: ``batches`` batches. The gradient
of a weight outside of experts is averaged over all data ranks. The gradient of an expert's weight already sums the
terms of ``batches`` batches, and is averaged over fewer ranks or none. Therefore gradients are divided by ``batches``
where they enter the experts' backward pass, and multiplied by ``batches`` where they leave this pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ...distributed.ops.collectives import all_to_all, apply_mapping
from .router_functions import count_each


@dataclass(frozen=True)
class Routes:
    """Hold the permutations that send the rows of one forward pass to their experts and back.

    A row is one token's copy for one of its ``k`` experts; a *route* is this assignment of a token to an expert.
    """

    shape: tuple[int, int]  # ``(n, k)``: tokens, and routes per token
    order: Tensor  # indices into the flattened ``[n, k]`` of the routes that are not dropped, sorted by expert
    places: Tensor  # for every route, the index in ``order``; ``len(order)`` for dropped routes
    send: Sequence[int]  # how many rows this rank sends to each rank
    receive: Sequence[int]  # how many rows arrive from each rank
    counts: Sequence[int]  # how many rows arrive for each expert of this rank
    # Permutation of arrived rows (by sender) to rows by expert; ``None`` for the identity.
    regroup: Tensor | None
    ungroup: Tensor | None
    group: dist.ProcessGroup | None

    @property
    def tokens(self) -> Tensor:
        """For each row that is sent, in sending order, the index of its token."""
        return self.order if self.shape[1] == 1 else self.order // self.shape[1]

    def to_experts(self, rows: Tensor) -> Tensor:
        """Send one row for each pair of a token and its expert, sorted by expert, to the experts' ranks. Return the
        arrived rows ``[arrived, ...]``, sorted by expert.
        """
        arrived = all_to_all(rows, self.send, self.receive, self.group)
        return arrived if self.regroup is None else arrived.index_select(0, self.regroup)

    def from_experts(self, grouped: Tensor) -> Tensor:
        """Send the experts' outputs back to the ranks of their tokens."""
        leaving = grouped if self.ungroup is None else grouped.index_select(0, self.ungroup)
        return all_to_all(leaving, self.receive, self.send, self.group)

    def sum_by_token(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the rows of each token, one row per expert of the token, to ``[n, h]``, weighted by ``weights [n, k]``.
        The given rows are sorted by expert, as they are sent.
        """
        return (
            self.added_up(rows, weights)
            if rows.device.type == "cpu"
            else self.gathered(rows, weights)
        )

    def added_up(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the rows of each token's experts with ``index_add_``: four times faster than
        :meth:`gathered` on a CPU.
        """
        weighted = rows if weights is None else rows * self.taken(weights)
        total = weighted.new_zeros((self.shape[0], *rows.shape[1:]))
        return total.index_add_(0, self.tokens, weighted)

    def gathered(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the rows of each token's experts by a gather, which is deterministic on GPUs, unlike ``index_add_``."""
        if len(self.order) < len(self.places):
            rows = F.pad(rows, (0, 0, 0, 1))
        routes = rows.index_select(0, self.places).unflatten(0, self.shape)
        return (routes if weights is None else routes * weights.unsqueeze(-1)).sum(1)

    def taken(self, weights: Tensor) -> Tensor:
        """Return the entries of ``weights [n, k]`` in the order in which rows are sent, as a column ``[rows, 1]``."""
        return weights.reshape(-1).index_select(0, self.order).unsqueeze(-1)


def plan_routes(
    experts: Tensor, count: int, group: dist.ProcessGroup | None
) -> tuple[Routes, list[int]]:
    """Plan how this rank's tokens are sent to their ``experts [n, k]``, and how their outputs return.

    Also return how many of this rank's tokens go to each of the ``count`` experts. An expert index of ``count`` means
    that the token is not sent.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    counts = count_each(flat, count + 1)[:count].view(ranks, -1)
    received = all_to_all(counts, [1] * ranks, [1] * ranks, group)
    # The only device synchronization.
    sent_to, arrived_from = torch.stack((counts, received)).tolist()
    kept = sum(map(sum, sent_to))
    total = sum(map(sum, arrived_from))
    places = torch.full_like(flat, kept)
    places[order] = torch.arange(len(flat), device=flat.device).clamp_(max=kept)
    regroup = ungroup = None
    if ranks > 1 and received.shape[1] > 1:
        # From sender order to expert order, without a sort or a device synchronization.
        lengths = received.t().flatten()
        starts = (received.flatten().cumsum(0) - received.flatten()).view_as(received).t().flatten()
        shift = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(
            lengths, output_size=total
        )
        regroup = shift + torch.arange(total, device=flat.device)
        ungroup = torch.empty_like(regroup)
        ungroup[regroup] = torch.arange(total, device=flat.device)
    routes = Routes(
        shape=(experts.shape[0], experts.shape[1]),
        order=order[:kept],
        places=places,
        send=[sum(row) for row in sent_to],
        receive=[sum(row) for row in arrived_from],
        counts=[sum(column) for column in zip(*arrived_from, strict=True)],
        regroup=regroup,
        ungroup=ungroup,
        group=group,
    )
    return routes, [number for row in sent_to for number in row]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grouped: Tensor,
        weights: Tensor,
        routes: Routes,
        batches: int,
    ) -> Tensor:
        rows = routes.from_experts(grouped)
        ctx.save_for_backward(rows, weights)
        ctx.routes = routes
        ctx.batches = batches
        return routes.sum_by_token(rows, weights).to(grouped.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights = ctx.saved_tensors
        routes = ctx.routes
        back = grads[0].index_select(0, ctx.routes.tokens)
        of_weights = None
        if ctx.needs_input_grad[1]:
            products = (rows * back).sum(-1, dtype=weights.dtype)
            of_weights = (
                torch.zeros_like(weights)
                .view(-1)
                .index_copy_(0, routes.order, products)
                .view_as(weights)
            )
        if not ctx.needs_input_grad[0]:
            return None, of_weights, None, None
        scale = routes.taken(weights)
        scale = scale / ctx.batches if ctx.batches > 1 else scale
        return routes.to_experts((back * scale).to(rows.dtype)), of_weights, None, None


def dispatch(x: Tensor, routes: Routes, batches: int) -> Tensor:
    """Send tokens ``x [n, h]`` to the ranks of their experts; return the rows that arrive, ``[arrived, h]``, sorted by
    expert.

    In the backward pass, multiply gradients by ``batches``, the number of batches of different data ranks whose tokens
    the experts compute.
    """

    def back(grad: Tensor) -> Tensor:
        total = routes.sum_by_token(routes.from_experts(grad))
        return total.mul_(batches) if batches > 1 else total

    return apply_mapping(
        x,
        lambda x: routes.to_experts(x.index_select(0, routes.tokens)),
        back,
    )


def combine(grouped: Tensor, weights: Tensor, routes: Routes, batches: int) -> Tensor:
    """Return the experts' outputs ``grouped [arrived, h]`` to the ranks of their tokens, and sum each token's ``k``
    outputs, weighted by ``weights [n, k]``, to ``[n, h]``.
    """
    return _Combine.apply(grouped, weights, routes, batches)
