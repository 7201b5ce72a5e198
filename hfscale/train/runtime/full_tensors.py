"""Gather a model's full tensors on rank 0, one at a time; no rank holds more than one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.transformers.saving import never_stored
from ...distributed.mesh import Mesh
from ...plan import ParameterPlan, Plan, write_share
from .runtime import Runtime
from .shards import local_tensor
from .writing import Attempt, is_writer, plainly


@dataclass(frozen=True)
class SavedTensor:
    """Describe one tensor to save and the pipeline rank that has it; the same on every rank."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    home: int
    planned: ParameterPlan | None  # None: a buffer, full on every rank of its stage

    def told(self) -> tuple[Any, ...]:
        """Return the fields as a short tuple to send to other ranks, which have the same plan; one per tensor."""
        planned = None if self.planned is None else self.planned.name
        return (self.name, tuple(self.shape), self.dtype, self.home, planned)

    @classmethod
    def hear(cls, told: tuple[Any, ...], plan: Plan) -> "SavedTensor":
        """Rebuild the entry from the tuple of :meth:`told`, on another rank."""
        name, shape, dtype, home, planned = told
        return cls(name, torch.Size(shape), dtype, home, None if planned is None else plan.by_name[planned])


def full_parameters(
    runtime: Runtime, wanted: Callable[[ParameterPlan], bool], attempt: Attempt = plainly
) -> Iterator[tuple[str, Tensor]]:
    """Yield owned parameters by name, one at a time: full on rank 0, empty elsewhere. Every rank must exhaust it."""
    entries = [entry for entry in tensors_to_save(runtime) if entry.planned and wanted(entry.planned)]
    for entry, (_, tensor) in zip(entries, full_tensors(runtime, entries, attempt=attempt), strict=True):
        yield entry.planned.name if entry.planned else entry.name, tensor


def tensors_to_save(runtime: Runtime) -> list[SavedTensor]:
    """Return everything to save, in order: parameters in plan order, except computed tables that transformers never
    stores, then buffers. Collective if there are pipeline stages.
    """
    told = tensors_of_stage(runtime)
    staged = runtime.plan.stages is not None
    return in_order(runtime, runtime.mesh.all_gather_object(told) if staged else [told])


def tensors_of_stage(runtime: Runtime) -> list[tuple[Any, ...]]:
    """Return the tuples of what this stage saves, for :func:`in_order`; empty on all but one rank of each stage."""
    mesh = runtime.mesh
    if runtime.plan.stages is not None and not mesh.speaks_for_stage:
        return []
    found = [
        SavedTensor(_kept_name(runtime, planned), torch.Size(planned.shape), parameter.dtype, mesh.pp_rank, planned)
        for planned, parameter in runtime.parameters()
        if runtime.counts(planned)
    ]
    found += [
        SavedTensor(name, buffer.shape, buffer.dtype, mesh.pp_rank, None) for name, buffer in _buffers(runtime).items()
    ]
    return [entry.told() for entry in found]


def in_order(runtime: Runtime, told: list[list[tuple[Any, ...]]]) -> list[SavedTensor]:
    """Merge the tuples of all stages into the sorted list of tensors to save; not collective."""
    plan, ignored = runtime.plan, never_stored(runtime.model)
    found = [SavedTensor.hear(each, plan) for entries in told for each in entries]
    places = {planned.name: place for place, planned in enumerate(plan.owned())}
    found.sort(key=lambda entry: places[entry.planned.name] if entry.planned else len(places))
    first = {entry.name: entry for entry in reversed(found)}  # the first stage saves buffers that several have
    return [entry for entry in found if first[entry.name] is entry and entry.name not in ignored]


def _kept_name(runtime: Runtime, planned: ParameterPlan) -> str:
    """Return the name under which transformers stores a tied tensor; it need not be its first name in the model."""
    source = runtime.model.all_tied_weights_keys.get(planned.name)
    by_name = runtime.plan.by_name
    return source if source in by_name and by_name[source].tied_to == planned.name else planned.name


def _buffers(runtime: Runtime) -> dict[str, Tensor]:
    """Return the persistent buffers; they are full and equal on every rank."""
    saved = runtime.model.state_dict().keys()
    return {name: buffer for name, buffer in runtime.model.named_buffers() if name in saved}


def full_tensors(
    runtime: Runtime,
    entries: list[SavedTensor],
    share_of: Callable[[SavedTensor], Tensor | None] | None = None,
    attempt: Attempt = plainly,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor to save, one at a time, in the same order on every rank: full on rank 0, empty elsewhere.

    Args:
        share_of: returns this rank's shard of an entry, if not the model's own parameter; cut the same way.
        attempt: calls everything that may fail on one rank alone. After a failure shards are still sent and
            received, so that no rank waits for another, and the tensors' values mean nothing.
    """
    held = share_of or _shares(runtime)
    for entry in entries:
        yield entry.name, _gather(entry, held(entry), runtime.mesh, attempt)


def _shares(runtime: Runtime) -> Callable[[SavedTensor], Tensor | None]:
    here = {planned.name: parameter for planned, parameter in runtime.parameters()}
    buffers = _buffers(runtime)

    def share_of(entry: SavedTensor) -> Tensor | None:
        held = here.get(entry.planned.name) if entry.planned else buffers.get(entry.name)
        return None if held is None else local_tensor(held.detach())

    return share_of


def _gather(entry: SavedTensor, share: Tensor | None, mesh: Mesh, attempt: Attempt) -> Tensor:
    cuts = entry.planned.cuts if entry.planned else ()
    is_here = not cuts and is_writer(mesh) and entry.home == 0
    if share is not None and (mesh.device_mesh is None or is_here):
        return share
    _, own = mesh.view(cuts)
    sends = mesh.pp_rank == entry.home and not any(own[axis] for axis in mesh.free_axes(cuts))
    sent = _on_host(share, attempt) if share is not None and sends else None
    if is_writer(mesh):
        return _put_together(entry, sent, mesh, attempt)
    if sent is not None and sent.numel():
        dist.send(sent.view(-1).view(torch.uint8), dst=0, group=mesh.control)
    return torch.empty(0, dtype=entry.dtype)


def _on_host(share: Tensor, attempt: Attempt) -> Tensor:
    """Return a CPU copy of a shard; after a failure, an empty tensor of the same size."""
    copied: Tensor | None = attempt(_copy, share)
    return torch.empty(share.shape, dtype=share.dtype) if copied is None else copied


def _copy(share: Tensor) -> Tensor:
    return share.cpu().contiguous()


def _put_together(entry: SavedTensor, own: Tensor | None, mesh: Mesh, attempt: Attempt) -> Tensor:
    """Assemble the full tensor from all ranks' shards; ``own`` is rank 0's shard, ``None`` if another rank sends it."""
    cuts = entry.planned.cuts if entry.planned else ()
    whole = attempt(partial(torch.empty, entry.shape, dtype=entry.dtype))
    for coordinates in product(*(range(cut.size) for cut in cuts)):
        ranks = {cut.axis: rank for cut, rank in zip(cuts, coordinates, strict=True)}
        share = _receive(entry, ranks, mesh) if own is None or any(coordinates) else own
        attempt(write_share, whole, share, cuts, ranks)
    return torch.empty(0, dtype=entry.dtype) if whole is None else whole


def _receive(entry: SavedTensor, ranks: dict[str, int], mesh: Mesh) -> Tensor:
    """Receive the shard of the rank with the coordinates ``ranks``."""
    shape = entry.planned.local_shape(ranks) if entry.planned else entry.shape
    share = torch.empty(shape, dtype=entry.dtype)
    if share.numel():
        source = mesh.rank_at(entry.planned.cuts if entry.planned else (), ranks, entry.home)
        dist.recv(share.view(-1).view(torch.uint8), src=source, group=mesh.control)
    return share
