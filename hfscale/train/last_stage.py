"""What the last stage of a pipeline has made, on every stage."""

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime import Runtime


def from_last_stage(runtime: Runtime, made: list[Tensor]) -> list[Tensor]:
    """Tensors of the rank that has the last stage, on all ranks of its pipeline, without a graph; collective.

    Args:
        made: there, the tensors; elsewhere it does not count.
    """
    group, stages = runtime.mesh.group("pp"), runtime.plan.stages
    if group is None or stages is None:
        return [tensor.detach() for tensor in made]
    holder = stages.ranks[-1]
    source, here = dist.get_global_rank(group, holder), runtime.mesh.ranks["pp"] == holder
    told = [[(tuple(tensor.shape), tensor.dtype) for tensor in made] if here else None]
    dist.broadcast_object_list(told, src=source, group=runtime.mesh.reports)
    device = runtime.mesh.device
    found = [tensor.detach().contiguous() for tensor in made] if here else []
    for index, (shape, dtype) in enumerate(told[0] or ()):
        tensor = found[index] if here else torch.empty(shape, dtype=dtype, device=device)
        # As bytes: backends do not know every type.
        dist.broadcast(tensor.view(torch.uint8) if dtype == torch.bool else tensor, src=source, group=group)
        if not here:
            found.append(tensor)
    return found
