"""Handle models that every rank holds in full: reward models and references that are only evaluated, and modules that
are no transformers models. Gather the full weights of sharded models, and check that models get the same batches.
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
from ...train.runtime import Runtime, find_runtime
from ...train.runtime.full_tensors import full_tensors, tensors_to_save


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


def check_alike(runtime: Runtime, first: Runtime) -> None:
    """Raise :class:`ConfigError` on every rank if a model's ranks share batches in another way than those of ``first``,
    the accelerator's first model, whose batches the loaders yield; collective for another layout.
    """
    layout, known = runtime.mesh.layout, first.mesh.layout
    if layout == known:
        return
    own = (runtime.mesh.batch_rank, runtime.mesh.batch_world)
    same = own == (first.mesh.batch_rank, first.mesh.batch_world)
    if not all(runtime.mesh.all_gather_object(same)):
        raise ConfigError(
            "models of one accelerator must share batches between ranks in the same way, because its loaders yield "
            f"batches for the first model's layout ({known.describe()}), got another model over {layout.describe()}: "
            "use the same data axes, or call free_memory() before you prepare the other model"
        )


def full_state(runtime: Runtime) -> dict[str, torch.Tensor]:
    """Return a model's full weights by their names in the stock model, on the first rank; empty elsewhere; collective.

    Raises:
        ConfigError: the model has adapters, or its weights are in 4 or 8 bits.
    """
    plan = runtime.plan
    if plan.adapters or plan.quantized_weights:
        raise ConfigError(
            "get_state_dict cannot gather adapters or weights in 4 or 8 bits over "
            f"{plan.layout.describe()}: call accelerator.save_model(model, directory), or iterate over "
            "hfscale.stream_weights(model)"
        )
    gathered = full_tensors(runtime, tensors_to_save(runtime))
    held = {entry.owned: full.cpu().clone() for entry, full in gathered}
    if not runtime.mesh.is_first:
        return {}
    tied = {each.name: held[each.tied_to] for each in plan.parameters if each.tied_to is not None}
    return held | tied


def parameter_ids(holders: Iterable[Any]) -> set[int]:
    """Return the ``id`` of every parameter of the modules or optimizers ``holders``."""
    ids = set[int]()
    for holder in holders:
        groups = getattr(holder, "param_groups", None) or [{"params": holder.parameters()}]
        ids.update(id(parameter) for group in groups for parameter in group["params"])
    return ids
