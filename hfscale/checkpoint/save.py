"""Write a plain Hugging Face checkpoint, tensor by tensor.

Data flow: shapes and types of all tensors are known from the plan, so rank 0 writes each file's header first and then
streams. For one parameter after the other, every rank whose share no other rank sends (replica 0 of the data axes)
sends it to rank 0, which puts it in its place in one whole tensor and writes that to its file. No rank ever holds more
than one whole tensor. Files grow in a hidden directory inside the target and move into place when all are whole.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _host, guards
from ..data import local_tensor
from ..errors import CheckpointError, ConfigError
from ..mesh import Mesh
from ..plan import ParameterPlan, write_share
from ..runtime import Runtime, runtime_of
from .writer import CheckpointWriter

_WAIT = timedelta(minutes=2)


def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    max_shard_size: str | int = "5GB",
    timeout: timedelta = _WAIT,
    check_replicas: bool = True,
) -> None:
    """Write ``model`` as an ordinary Hugging Face directory that loads with hfscale uninstalled.

    Call it on every rank. Weights that ``directory`` holds already are replaced at the very end. Of a model with
    adapters, the adapter is written, in PEFT's format.

    Args:
        max_shard_size: the most bytes in one file, as for the host's ``save_pretrained``.
        timeout: how long to wait for ranks that have not called it.
        check_replicas: compare, bit by bit, what several ranks hold together.

    Raises:
        CheckpointError: a rank did not arrive, ranks have drifted apart, or writing failed; ``directory`` is then as it
            was before.
    """
    runtime, target = runtime_of(model), Path(directory)
    everyone_arrives(runtime.mesh, timeout, f"save_pretrained({str(target)!r})")
    if check_replicas:
        guards.check_replicas(runtime, f"save_pretrained({str(target)!r})")
    if runtime.adapters is not None:
        runtime.adapters.save(runtime, target)
        return
    if runtime.plan.quantized is not None:
        raise ConfigError(
            f"the model is held in {runtime.plan.quantized.bits} bits, and {str(target)!r} would keep their error for "
            "good: merge it into 16 bits first, with hfscale.merge_and_unload(model, dtype=torch.bfloat16), or train "
            "an adapter (load the model with peft_config=...), which save_pretrained writes by itself"
        )
    writer, failure = None, None
    entries = _entries(runtime)
    contents = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries}
    stored = _host.stored_layout(runtime.model, contents)
    if is_writer(runtime.mesh):
        try:
            writer = CheckpointWriter(target, stored, max_shard_size)
        except (OSError, CheckpointError) as error:
            failure = error
    # Rank 0 takes every tensor even after a failure, so that no other rank waits forever to send its share.
    for name, tensor in _whole_tensors(runtime, entries):
        if writer is not None and failure is None:
            try:
                for stored_name, part in _host.as_stored(runtime.model, name, tensor).items():
                    writer.add(stored_name, part)
            except (OSError, CheckpointError) as error:
                failure = error
    if writer is not None:
        try:
            if failure is None:
                _host.write_configs(runtime.model, writer.staging)
                writer.finish()
        except (OSError, CheckpointError) as error:
            failure = error
        finally:
            shutil.rmtree(writer.staging, ignore_errors=True)
    report(runtime.mesh, failure, target)


def is_writer(mesh: Mesh) -> bool:
    """Whether this rank writes files: the first one."""
    return not any(mesh.ranks.values())


def everyone_arrives(mesh: Mesh, timeout: timedelta, call: str) -> None:
    """Wait for every rank to make the same ``call``.

    Raises:
        CheckpointError: one did not within ``timeout``.
    """
    if mesh.control is None:
        return
    try:
        dist.monitored_barrier(mesh.control, timeout=timeout)
    except RuntimeError as error:
        raise CheckpointError(
            f"{call} is a collective call, and not every rank made it within "
            f"{timeout.total_seconds():.0f} s: call it on all {mesh.layout.total_size} ranks (not only on the main "
            f"process). Nothing was written. {error}"
        ) from error


def report(mesh: Mesh, failure: Exception | None, target: Path) -> None:
    """Every rank learns whether rank 0 succeeded."""
    message = [f"{type(failure).__name__}: {failure}" if failure else ""]
    if mesh.control is not None:
        dist.broadcast_object_list(message, src=0, group=mesh.control)
    if message[0]:
        raise CheckpointError(f"{target} could not be written: {message[0]}") from failure


@dataclass(frozen=True)
class _Entry:
    """One tensor to save: what it is, and the pipeline rank it comes from. The same on every rank."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    home: int
    planned: ParameterPlan | None  # None: a buffer, whole on every rank of its stage


def whole_parameters(runtime: Runtime, wanted: Callable[[ParameterPlan], bool]) -> Iterator[tuple[str, Tensor]]:
    """Owned parameters by name, one at a time: whole on rank 0, empty elsewhere. Every rank goes through all."""
    entries = [entry for entry in _entries(runtime) if entry.planned and wanted(entry.planned)]
    for entry, (_, tensor) in zip(entries, _whole_tensors(runtime, entries), strict=True):
        yield entry.planned.name if entry.planned else entry.name, tensor


def _entries(runtime: Runtime) -> list[_Entry]:
    """Everything to save, in order: parameters in the plan's, but those that the host never stores (tables that it
    computes), then buffers.
    """
    mesh, plan = runtime.mesh, runtime.plan
    ignored = _host.never_stored(runtime.model)
    found = [
        _Entry(_kept_name(runtime, planned), torch.Size(planned.shape), parameter.dtype, mesh.ranks["pp"], planned)
        for planned, parameter in runtime.parameters()
        if runtime.counts(planned)
    ]
    found += [
        _Entry(name, buffer.shape, buffer.dtype, mesh.ranks["pp"], None) for name, buffer in _buffers(runtime).items()
    ]
    if plan.stages is not None:
        # One rank of each stage speaks for all of it.
        speaks = not any(rank for axis, rank in mesh.ranks.items() if axis != "pp")
        found = [entry for entries in mesh.everyones(found if speaks else []) for entry in entries]
    places = {planned.name: place for place, planned in enumerate(plan.owned())}
    found.sort(key=lambda entry: places[entry.planned.name] if entry.planned else len(places))
    first = {entry.name: entry for entry in reversed(found)}  # a buffer that every stage has is the first one's
    return [entry for entry in found if first[entry.name] is entry and entry.name not in ignored]


def _kept_name(runtime: Runtime, planned: ParameterPlan) -> str:
    """The one of a tensor's names under which the host stores it; that need not be the first in the model."""
    source = runtime.model.all_tied_weights_keys.get(planned.name)
    by_name = runtime.plan.by_name
    return source if source in by_name and by_name[source].tied_to == planned.name else planned.name


def _buffers(runtime: Runtime) -> dict[str, Tensor]:
    """Buffers that belong in a checkpoint; they are whole and equal on every rank."""
    saved = runtime.model.state_dict().keys()
    return {name: buffer for name, buffer in runtime.model.named_buffers() if name in saved}


def _whole_tensors(runtime: Runtime, entries: list[_Entry]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor to save, one at a time: whole on rank 0, empty elsewhere. Same order on every rank."""
    here = {planned.name: parameter for planned, parameter in runtime.parameters()}
    buffers = _buffers(runtime)
    for entry in entries:
        held = here.get(entry.planned.name) if entry.planned else buffers.get(entry.name)
        share = None if held is None else local_tensor(held.detach())
        yield entry.name, _gather(entry, share, runtime.mesh)


def _gather(entry: _Entry, share: Tensor | None, mesh: Mesh) -> Tensor:
    cuts = entry.planned.cuts if entry.planned else ()
    if share is not None and (mesh.device_mesh is None or (not cuts and is_writer(mesh) and entry.home == 0)):
        return share
    axes = [cut.axis for cut in cuts]
    device_mesh, own = mesh.view(cuts)
    at_home = own["pp"] == entry.home
    sends = at_home and not any(rank for axis, rank in own.items() if axis not in (*axes, "pp"))
    share = share.cpu().contiguous() if share is not None and sends else torch.empty(0, dtype=entry.dtype)
    if not is_writer(mesh):
        if sends and share.numel():
            dist.send(share.view(-1).view(torch.uint8), dst=0, group=mesh.control)
        return share.new_empty(0)
    whole = share.new_empty(entry.shape)
    for coordinates in product(*(range(cut.size) for cut in cuts)):
        ranks = {**dict(zip(axes, coordinates, strict=True)), "pp": entry.home}
        if sends and not any(coordinates):
            piece = share
        else:
            piece = share.new_empty(entry.planned.local_shape(ranks) if entry.planned else entry.shape)
            if piece.numel():
                dist.recv(piece.view(-1).view(torch.uint8), src=_global_rank(device_mesh, ranks), group=mesh.control)
        write_share(whole, piece, cuts, ranks)
    return whole


def _global_rank(device_mesh: DeviceMesh | None, ranks: dict[str, int]) -> int:
    assert device_mesh is not None
    names: Any = device_mesh.mesh_dim_names
    return int(device_mesh.mesh[tuple(ranks.get(name, 0) for name in names)])
