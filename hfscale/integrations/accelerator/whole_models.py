"""Models that every rank holds whole, and only evaluates: reward models, references that are not parallelized."""

import torch
import torch.distributed as dist
from torch import nn

from ...distributed.mesh import Mesh
from ...train.guards.replicas import checksum


@torch.no_grad()
def agree_on_weights(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank the first one's weights, collective: each drew for itself what a checkpoint lacks, as a head."""
    if mesh.control is None:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: int(checksum(tensor)) for name, tensor in tensors.items()}
    every = mesh.all_gather_object(own)
    for name, tensor in tensors.items():
        if any(each.get(name) != own[name] for each in every):
            given = tensor.detach().contiguous()
            dist.broadcast(given, src=0)
            tensor.copy_(given)
