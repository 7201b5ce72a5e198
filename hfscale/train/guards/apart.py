"""Raise an error when an optimizer is about to step parameters outside of the parallelized model (such as a separate
head) for which data ranks have different gradients: each rank would train its own copy.

If an optimizer holds such parameters together with the model's parameters, all ranks step it, so a collective compares
their gradients. If it holds only outside parameters, it may belong to an unrelated model that one rank trains alone, so
a collective could wait forever. Then ranks compare checksums once, through the rendezvous store, and give up after a
few seconds. The error is raised only if the parameters are equal on all ranks.
"""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..._compat.torch_gloo import own_store
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ..runtime import Runtime, find_runtime

_TOLERANCE = 1e-3
_PATIENCE = timedelta(seconds=10)
_FLAT = ("_is_flat_param", "ds_id")  # marks of parameters that FSDP1 and DeepSpeed shard
_models: "WeakSet[nn.Module]" = WeakSet()
_asked = Counter[
    str
]()  # how many optimizers, by the shapes of their parameters, have been compared

_Digest = tuple[float, float]
"""The sum and the norm of a tensor, by which ranks compare it."""


def watch_for_others(runtime: Runtime) -> None:
    """Register a model that has several data ranks, so that :func:`refuse_alone` checks optimizers without any
    parameters of the model.
    """
    _models.add(runtime.model)


def refuse_beside(
    optimizer: torch.optim.Optimizer, beside: Sequence[Tensor], mesh: Mesh, layout: str
) -> None:
    """Raise :class:`ConfigError` if an optimizer of the model also holds parameters ``beside``, which are outside of
    the model, and ranks have different gradients for them; collective. Gradients that DDP or a script has already
    summed over ranks are equal, and accepted.
    """
    every = mesh.all_gather_object([_digest(parameter.grad) for parameter in beside])
    _refuse(optimizer, beside, every, layout)


def refuse_alone(optimizer: torch.optim.Optimizer, held: Sequence[Tensor]) -> None:
    """Raise :class:`ConfigError` if an optimizer that holds no parameters of the parallelized model would train
    different copies on each rank: its parameters ``held`` are equal on all ranks, but their gradients differ.
    """
    meshes = [runtime.mesh for model in list(_models) if (runtime := find_runtime(model))]
    trained = [entry for entry in held if entry.requires_grad]
    sharded = any(
        isinstance(entry, DTensor) or any(hasattr(entry, mark) for mark in _FLAT)
        for entry in trained
    )
    if not meshes or not trained or sharded or not dist.is_initialized():
        return
    told = _told_by_all(optimizer, trained, meshes[0])
    if told is None:
        return
    values, gradients = zip(*told, strict=True)
    if not any(_is_apart(values, index) for index in range(len(trained))):
        _refuse(optimizer, trained, gradients, meshes[0].layout.describe())


def _told_by_all(
    optimizer: torch.optim.Optimizer, trained: Sequence[Tensor], mesh: Mesh
) -> list[tuple[list[_Digest], list[_Digest]]] | None:
    """Return each rank's checksums of the parameters' values and gradients, exchanged through the rendezvous store.
    Return ``None`` if some rank does not step an optimizer with parameters of the same shapes within a few seconds.
    """
    kind = f"{type(optimizer).__name__} {[tuple(entry.shape) for entry in trained]}"
    _asked[kind] += 1
    store: Any = own_store(f"hfscale/alone/{kind}/{_asked[kind]}")
    own = [_digest(entry) for entry in trained], [_digest(entry.grad) for entry in trained]
    store.set(str(mesh.rank), json.dumps(own))
    ranks = [str(rank) for rank in range(mesh.layout.total_size)]
    try:
        store.wait(ranks, _PATIENCE)
    except RuntimeError:  # the store's timeout has passed
        return None
    return [tuple(json.loads(store.get(rank))) for rank in ranks]


def _refuse(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    every: Sequence[Sequence[_Digest]],
    layout: str,
) -> None:
    for index, parameter in enumerate(parameters):
        if _is_apart(every, index):
            raise ConfigError(
                f"{type(optimizer).__name__} must hold only parameters of the model, or others whose gradient is the "
                f"same on every rank of {layout}, got a parameter of shape {tuple(parameter.shape)} outside of the "
                "model, of which each rank would train its own copy: put it into the model before "
                "hfscale.parallelize, adapt the layers by hfscale.get_peft_model, sum its gradient over ranks first, "
                "or use one process"
            )


def _is_apart(every: Sequence[Sequence[_Digest]], index: int) -> bool:
    """Return whether the checksums of tensor number ``index`` differ between ranks by more than rounding. ``every``
    holds the checksums of all tensors, by rank.
    """
    sums, norms = zip(*(told[index] for told in every), strict=True)
    apart = max(max(sums) - min(sums), max(norms) - min(norms))
    return bool(apart > _TOLERANCE * max(norms))


def _digest(tensor: Tensor | None) -> _Digest:
    wide = torch.zeros(()) if tensor is None else tensor.detach().double()
    return float(wide.sum()), float(wide.norm())
