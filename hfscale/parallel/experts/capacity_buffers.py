"""Exchange tokens with their experts through buffers of fixed capacity, so that the host never waits for the device.

Every rank sends ``slots`` rows to each expert, used or not, so all sizes are known in advance::

    sender     [n, h] --each route's token into its slot--> [experts, slots, h], zero in unused slots
               --all-to-all--> expert's rank [experts/r, slots of all senders, h]

and the same backwards. Unused slots cost computation, but no route reads their outputs, so they have no gradient.
Experts see tokens of several batches; for what that means for gradients see :mod:`.dispatch`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ops import all_to_all


class _Exchange(torch.autograd.Function):
    """All-to-all of rows forward, and of their gradients times ``factor`` backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup, factor: float
    ) -> Tensor:
        ctx.back, ctx.factor = (receive, send, group), factor
        return all_to_all(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return all_to_all(grads[0] * ctx.factor, *ctx.back), None, None, None, None


def through_slots(
    hidden: Tensor,
    weights: Tensor,
    places: Tensor,
    count: int,
    slots: Sequence[int],
    compute: Callable[[Tensor, list[int]], Tensor],
    group: dist.ProcessGroup | None,
    batches: int,
) -> Tensor:
    """Send this rank's tokens through the experts of all ranks and back; return the weighted sums ``[n, h]``.

    Args:
        hidden: ``[n, h]``, the tokens.
        weights: ``[n, k]``, the weights of their routes.
        places: ``[n, k]``: the slot of each route, ``expert * slots + place``; ``count * slots`` for dropped ones.
        count: the number of experts on all ranks.
        slots: how many rows each rank of ``group`` sends to each expert.
        compute: rows ``[r, h]``, and how many of them each of this rank's experts has -> ``[r, h]``.
        group: the expert ranks; ``None`` for one.
        batches: the number of distinct batches among those ranks.
    """
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    local, own, width = count // ranks, slots[rank], hidden.shape[-1]
    k = places.shape[1]
    rows = hidden if k == 1 else hidden.repeat_interleave(k, 0)
    # One extra row receives the dropped routes, and is cut off.
    buffer = hidden.new_zeros(count * own + 1, width).index_copy(0, places.flatten(), rows)[:-1]
    send, receive = [local * own] * ranks, [local * other for other in slots]
    if group is not None:
        buffer = _Exchange.apply(buffer, send, receive, group, float(batches))
    by_sender = [part.view(local, other, width) for part, other in zip(buffer.split(receive), slots, strict=True)]
    grouped = torch.cat(by_sender, 1).flatten(0, 1)
    out = compute(grouped, [sum(slots)] * local).view(local, sum(slots), -1)
    leaving = torch.cat([part.flatten(0, 1) for part in out.split(list(slots), 1)])
    if group is not None:
        leaving = _Exchange.apply(leaving, receive, send, group, 1.0 / batches)
    back = torch.cat((leaving, leaving.new_zeros(1, leaving.shape[-1])))
    return (back[places] * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
