"""All-to-all of a tensor's rows between ranks; no autograd, since the callers compute better gradients themselves.

::

    rank 0: [a0 a1] ----> [a0 b0]      each rank sends send[r] rows to rank r, in rank order,
    rank 1: [b0 b1] ----> [a1 b1]      and gets receive[r] rows from it
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send rows of ``x [sum(send), ...]``, rank 0's first; return ``[sum(receive), ...]``, rank 0's rows first.

    Every rank of ``group`` takes part, also one that neither sends nor receives; without a group it returns ``x``.
    """
    if group is None:
        return x
    received = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=group)
    return received


def exchange_counts(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Exchange ``counts [ranks, n]``: row ``r`` goes to rank ``r``; row ``r`` of the result came from rank ``r``."""
    if group is None:
        return counts
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received
