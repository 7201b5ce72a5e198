"""Exchange tokens with their experts through buffers of fixed capacity, so that the host never waits for the device.

Every rank sends ``slots`` rows to each expert, used or not, so all sizes are known in advance::

    sender     [n, h] --each route's token into its slot--> [experts, slots, h], zero in unused slots
               --all-to-all--> expert's rank [experts/r, slots of all senders, h]

and the same backwards. Unused slots cost computation, but no route reads their outputs, so they have no gradient.
Experts see tokens of several batches; for what that means for gradients see :mod:`.dispatch`.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.ops.collectives import all_to_all, apply_mapping


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
    """Send tokens to their experts in buffers of fixed capacity, and return the combined outputs ``[n, h]``.

    Args:
        places: ``[n, k]``: the slot of each route, ``expert * slots + place``; ``count * slots`` for dropped ones.
        slots: how many rows each rank of ``group`` sends to each expert.
        compute: rows ``[r, h]``, and how many of them each of this rank's experts has -> ``[r, h]``.
    """
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    local, own, width = count // ranks, slots[rank], hidden.shape[-1]
    k = places.shape[1]
    rows = hidden if k == 1 else hidden.repeat_interleave(k, 0)
    # One extra row receives the dropped routes, and is cut off.
    buffer = hidden.new_zeros(count * own + 1, width).index_copy(0, places.flatten(), rows)[:-1]
    send, receive = [local * own] * ranks, [local * other for other in slots]
    if group is not None:
        buffer = _exchanged(buffer, send, receive, group, float(batches))
    by_sender = [part.view(local, other, width) for part, other in zip(buffer.split(receive), slots, strict=True)]
    grouped = torch.cat(by_sender, 1).flatten(0, 1)
    out = compute(grouped, [sum(slots)] * local).view(local, sum(slots), -1)
    leaving = torch.cat([part.flatten(0, 1) for part in out.split(list(slots), 1)])
    if group is not None:
        leaving = _exchanged(leaving, receive, send, group, 1.0 / batches)
    back = torch.cat((leaving, leaving.new_zeros(1, leaving.shape[-1])))
    return (back[places] * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _exchanged(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup, factor: float) -> Tensor:
    """Exchange rows by all-to-all; multiply the gradients by ``factor`` on their way back."""
    return apply_mapping(
        rows,
        lambda rows: all_to_all(rows, send, receive, group),
        lambda grad: all_to_all(grad * factor, receive, send, group),
    )
