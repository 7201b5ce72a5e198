"""Handle models that every rank holds in full: reward models and references that are only evaluated, and modules that
are no transformers models.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...train.guards.replicas import checksum
from ...train.runtime import find_runtime


@torch.no_grad()
def agree_on_weights(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank the first rank's weights; collective. Weights that a checkpoint lacks (a new head, for example)
    would otherwise differ between ranks, since each rank initializes them at random.
    """
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


def is_plain(model: nn.Module) -> bool:
    """Return whether a module neither is nor contains a transformers model, so that hfscale does not shard it."""
    has_model = any(isinstance(module, PreTrainedModel) for module in model.modules())
    return not has_model and find_runtime(model) is None


def check_beside(modules: Iterable[nn.Module], mesh: Mesh) -> None:
    """Raise :class:`ConfigError` for ``modules``, which are no transformers models, if ranks share a batch, because DDP
    averages their gradients over all processes.
    """
    layout = mesh.layout
    for module in modules:
        if mesh.batch_world != layout.total_size:
            raise ConfigError(
                f"{type(module).__name__}, which was not parallelized by hfscale, can train only where every process "
                f"has its own batch, but the parallelized model has the layout {layout.describe()}: use dp_shard_size "
                "or dp_replicate_size alone, or prepare this module with evaluation_mode=True if it does not train"
            )


def parameter_ids(holders: Iterable[Any]) -> set[int]:
    """Return the ``id`` of every parameter of the modules or optimizers ``holders``."""
    ids = set[int]()
    for holder in holders:
        groups = getattr(holder, "param_groups", None) or [{"params": holder.parameters()}]
        ids.update(id(parameter) for group in groups for parameter in group["params"])
    return ids
