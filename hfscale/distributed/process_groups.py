"""Build the device mesh and its process groups; this module is the only caller of ``init_device_mesh``."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config.environment import started_processes
from ..config.parallel import ParallelConfig
from ..errors import MeshError
from .failures import explain_errors, share_failures
from .mesh import EXPERT_AXES, MESH_AXES, Mesh
from .processes import (
    Pair,
    backend_of,
    bound,
    connect,
    device_group,
    host_group,
    keep_patience,
    made_out_of,
    own_device,
    rounds,
    start,
    stay_on_this_machine,
)


def build_mesh(
    layout: ParallelConfig,
    replicas: Sequence[int] = (),
    ties: Sequence[tuple[int, ...]] = (),
    neighbours: Sequence[Pair] = (),
) -> Mesh:
    """Build the mesh of a layout, and start torch's process group if there is none.

    Args:
        layout: the size of each axis.
        replicas: sizes of additional groups of consecutive tensor-parallel ranks.
        ties: pipeline ranks that hold one tied tensor; each entry gets a group.
        neighbours: pairs of pipeline ranks that hold consecutive stages; each pair gets a group per direction.

    All arguments must be the same on every rank, in the same order.
    """
    world = dist.get_world_size() if dist.is_initialized() else started_processes()
    if world != layout.total_size:
        multi = "--multi_gpu " if layout.total_size > 1 else ""
        script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "YOUR_SCRIPT.py"
        raise MeshError(
            f"{layout.describe()} needs {layout.total_size} process(es) and {world} were started: launch with\n"
            f"  accelerate launch {multi}--num_processes {layout.total_size} {script}\n"
            f"or choose sizes whose product is {world}"
        )
    device = own_device()
    if world == 1:
        explain_errors()
        return Mesh(layout, device, dict.fromkeys((*MESH_AXES, "cp"), 0))
    stay_on_this_machine()
    if not dist.is_initialized():
        start(device)
    made = made_out_of(dist.group.WORLD)
    shape = tuple(layout.size(axis) for axis in MESH_AXES)
    device_mesh = made.once((device.type, shape), partial(_divided, device, shape, MESH_AXES))
    ranks = {axis: device_mesh.get_local_rank(axis) for axis in MESH_AXES}
    ranks["cp"] = ranks["dp_shard"] % layout.cp
    control = made.once("control", lambda: host_group([range(world)]))
    made.once("failures", lambda: share_failures(control))
    explain_errors()
    mesh = Mesh(layout, device, ranks, device_mesh, control)
    for count in replicas:
        make = partial(_consecutive_ranks, device_mesh, device, count)
        mesh.replicas[count] = _once(mesh, make, "replicas", count)
    if layout.cp > 1:
        context, others = context_groups(mesh, layout.dp_shard, layout.cp)
        mesh = replace(
            mesh, context=context, whole_sequences=others if layout.asked("dp_shard") > 1 else None
        )
    if layout.ep > 1:
        mesh = _with_experts(mesh)
    if layout.pp > 1:
        add_ties(mesh, ties)
        mesh = _with_stages(mesh, neighbours)
    mesh = made.latest = replace(mesh, sharing=_ranks_of_one_batch(mesh))
    return mesh


def add_ties(mesh: Mesh, ties: Sequence[tuple[int, ...]]) -> None:
    """Add to a mesh a group for each entry of ``ties``: the pipeline ranks that hold one tied tensor; collective."""
    for members in ties if mesh.layout.pp > 1 else ():
        columns = _columns(mesh, members)
        group = _once(mesh, partial(device_group, columns, mesh.device), "ties", members)
        reports = group
        if mesh.device.type != "cpu":
            reports = _once(mesh, partial(host_group, columns), "tie reports", members)
        if mesh.pp_rank in members:
            mesh.ties[members] = group
            mesh.tie_reports[members] = reports


def latest_mesh() -> Mesh | None:
    """Return the mesh that was built last; ``None`` if none was built yet, and in a single process."""
    return made_out_of(dist.group.WORLD).latest if dist.is_initialized() else None


def _once(mesh: Mesh, make: Callable[[], Any], *key: Any) -> Any:
    """Return the result of ``make``, which only the first model with this kind of device, sizes of axes and ``key``
    runs.
    """
    return made_out_of(dist.group.WORLD).once(_key(mesh, *key), make)


def _key(mesh: Mesh, *key: Any) -> tuple[Any, ...]:
    return mesh.device.type, tuple(mesh.layout.size(axis) for axis in MESH_AXES), *key


def _divided(
    device: torch.device,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> DeviceMesh:
    world: Any = dist.group.WORLD
    options: dict[str, Any] = {}
    if ":" in dist.get_backend(world) and (own := backend_of(world, device)):
        # The user's process group has backends for several kinds of devices; its subgroups need only one of them.
        options["backend_override"] = dict.fromkeys(axes, own)
    with bound(device):
        device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=axes, **options)
    for group in (
        device_mesh.get_group(axis) for axis, size in zip(axes, shape, strict=True) if size > 1
    ):
        keep_patience(group, device)
        connect(group, device)
    return device_mesh


def context_groups(mesh: Mesh, every: int, size: int) -> tuple[Any, Any]:
    """Divide each run of ``every`` consecutive ``dp_shard`` ranks into groups of ``size`` consecutive ranks, for
    context parallelism.

    Return this rank's group, and the group of the ranks that have this rank's position in the groups of the same run.
    """
    assert mesh.device_mesh is not None
    lines = mesh.device_mesh.mesh.movedim(MESH_AXES.index("dp_shard"), -1).unflatten(
        -1, (-1, every // size, size)
    )
    near, far = (
        _once(
            mesh,
            partial(device_group, each.flatten(0, -2).tolist(), mesh.device),
            name,
            every,
            size,
        )
        for name, each in (("near", lines), ("far", lines.movedim(-1, -2)))
    )
    return near, far


def _with_experts(mesh: Mesh) -> Mesh:
    """Return ``mesh`` with the device mesh over :data:`EXPERT_AXES` (for experts), and with its process groups."""
    layout = mesh.layout
    device = mesh.device
    shape = tuple(layout.size("expert_tp" if axis == "tp" else axis) for axis in EXPERT_AXES)
    # Models whose experts divide the ranks alike share these groups, whatever their other axes.
    made = made_out_of(dist.group.WORLD)
    key = (device.type, "experts", shape)
    expert_mesh: DeviceMesh = made.once(key, partial(_divided, device, shape, EXPERT_AXES))
    reports = expert_mesh.get_group("ep")
    if device.type != "cpu":
        lines = expert_mesh.mesh.movedim(EXPERT_AXES.index("ep"), -1).reshape(-1, layout.ep)
        reports = made.once((*key, "reports"), partial(host_group, lines.tolist()))
    ranks = {**{axis: expert_mesh.get_local_rank(axis) for axis in EXPERT_AXES}, **mesh.ranks}
    return replace(mesh, ranks=ranks, expert_mesh=expert_mesh, expert_reports=reports)


def _with_stages(mesh: Mesh, neighbours: Sequence[Pair]) -> Mesh:
    """Return ``mesh`` with the groups of pipeline ranks: one for each pair of ``neighbours`` and direction, for
    tensors, and one of all stages, for small messages.
    """
    layout = mesh.layout
    every = _columns(mesh, range(layout.pp))
    reports = _once(mesh, partial(host_group, every), "reports")
    ways = [way for a, b in neighbours for way in ((a, b), (b, a))]
    streams = dict[Pair, dist.ProcessGroup]()
    for forward in (True, False):
        # without a flush, gradients stay in flight between calls, so each model needs groups of its own
        known = made_out_of(dist.group.WORLD).made if forward or layout.flushes else {}
        keys = {way: _key(mesh, "way", way) for way in ways if (way[0] < way[1]) == forward}
        for pairs in rounds([way for way, key in keys.items() if key not in known]):
            columns = [ranks for pair in pairs for ranks in _columns(mesh, pair)]
            mine = device_group(columns, mesh.device)
            known |= {keys[way]: mine if mesh.pp_rank in way else None for way in pairs}
        streams |= {way: known[key] for way, key in keys.items() if known[key] is not None}
    return replace(mesh, streams=streams, reports=reports)


def _consecutive_ranks(
    device_mesh: DeviceMesh, device: torch.device, count: int
) -> dist.ProcessGroup:
    """Return this rank's group of ``count`` consecutive tensor ranks: for 2 with tp4, ``{0, 1}`` or ``{2, 3}``."""
    if count == device_mesh.size(len(MESH_AXES) - 1):
        return device_mesh.get_group("tp")
    group = device_group(device_mesh.mesh.view(-1, count).tolist(), device)
    assert group is not None
    return group


def _columns(mesh: Mesh, members: Sequence[int]) -> list[list[int]]:
    """Return, for each position within a stage (data and tensor coordinates), the global ranks that have this position
    on the pipeline ranks ``members``.
    """
    assert mesh.device_mesh is not None
    ranks = mesh.device_mesh.mesh.flatten(1).T.tolist()
    return [[column[member] for member in members] for column in ranks]


def _ranks_of_one_batch(mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the gloo group of the pipeline, context and tensor ranks that receive the same batch as this rank."""
    layout = mesh.layout
    device_mesh = mesh.device_mesh
    cp = mesh.layout.cp
    if layout.tp == cp == 1 or device_mesh is None:
        return mesh.reports
    if layout.pp == cp == 1 and mesh.device.type == "cpu":
        return mesh.tp_group
    # Reorder the mesh (pp, replicate, shard x cp, tp) to (replicate, shard; pp, cp, tp): one row of ranks per batch.
    lines = device_mesh.mesh.unflatten(2, (-1, cp)).movedim(0, 2).flatten(2).flatten(0, 1).tolist()
    sharing: dist.ProcessGroup | None = _once(mesh, partial(host_group, lines), "sharing", cp)
    return sharing
