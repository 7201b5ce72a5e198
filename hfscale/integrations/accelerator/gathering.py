"""Gather and reduce over ranks so that ranks that share a batch (tensor ranks, for example) count once."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import Tensor

from ...distributed.mesh import Mesh


def gather_batches(mesh: Mesh, tensors: Any) -> Any:
    """Concatenate the ranks' tensors along the first dim, in batch order; ranks that share a batch (tensor ranks, for
    example) count once.
    """
    groups = mesh.batch_groups

    def gather_one(local: Tensor) -> Tensor:
        local = (local[None] if local.ndim == 0 else local).contiguous()
        for group in groups:
            pieces = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(pieces, local, group=group)
            local = torch.cat(pieces)
        return local

    return recursively_apply(gather_one, tensors, error_on_other_type=True)


def reduce_batches(mesh: Mesh, tensors: Any, reduction: str, scale: float) -> Any:
    """Return the sum or mean of the ranks' tensors, times ``scale``; ranks that share a batch (tensor ranks, for
    example) count once.
    """

    def reduce_one(local: Tensor) -> Tensor:
        total = local.clone()
        for group in mesh.batch_groups:
            dist.all_reduce(total, group=group)
        return total * scale / (mesh.batch_world if reduction == "mean" else 1)

    return recursively_apply(reduce_one, tensors, error_on_other_type=True)


def gather_objects(mesh: Mesh, objects: Any) -> list[Any]:
    """Return the objects of all ranks in one list, in batch order; ranks that share a batch (tensor ranks, for example)
    count once.
    """
    told = mesh.all_gather_object((mesh.batch_rank, objects))
    first = dict(reversed(told))  # of ranks that share a batch, the first one's objects count
    return [each for batch_rank in sorted(first) for each in first[batch_rank]]


def holds_tensors_alone(data: Any) -> bool:
    """Return whether nested containers contain only tensors."""
    try:
        recursively_apply(lambda each: each, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
