"""Broadcast tensors from a pipeline's last stage to all of its stages."""

import torch
import torch.distributed as dist
from torch import Tensor

from .runtime import Runtime


def from_last_stage(runtime: Runtime, made: list[Tensor]) -> list[Tensor]:
    """Return the last stage's tensors on all ranks of its pipeline, without a graph; collective.

    Args:
        made: the tensors, on the rank that has the last stage; ignored elsewhere.
    """
    group, stages = runtime.mesh.pp_group, runtime.plan.stages
    if group is None or stages is None:
        return [tensor.detach() for tensor in made]
    holder = stages.ranks[-1]
    source, here = dist.get_global_rank(group, holder), runtime.mesh.pp_rank == holder
    told = [[(tuple(tensor.shape), tensor.dtype) for tensor in made] if here else None]
    dist.broadcast_object_list(told, src=source, group=runtime.mesh.reports)
    device = runtime.mesh.device
    found = [tensor.detach().contiguous() for tensor in made] if here else []
    for index, (shape, dtype) in enumerate(told[0] or ()):
        tensor = found[index] if here else torch.empty(shape, dtype=dtype, device=device)
        # Booleans as bytes: not every backend can send them.
        dist.broadcast(tensor.view(torch.uint8) if dtype == torch.bool else tensor, src=source, group=group)
        if not here:
            found.append(tensor)
    return found
