"""Build the device mesh and its process groups; this module is the only caller of ``init_device_mesh``."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config.environment import started_processes
from ..config.parallel import ParallelConfig
from ..errors import MeshError
from .failures import explain_memory_errors, share_failures
from .mesh import EXPERT_AXES, MESH_AXES, Mesh
from .processes import (
    Groups,
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
        explain_memory_errors()
        return Mesh(layout, device, dict.fromkeys((*MESH_AXES, "cp"), 0))
    stay_on_this_machine()
    if not dist.is_initialized():
        start(device)
    made = made_out_of(dist.group.WORLD)
    shape = tuple(layout.size(axis) for axis in MESH_AXES)
    key = (device.type, shape)
    device_mesh = made.once(key, partial(_divided, device, shape, MESH_AXES))
    ranks = {axis: device_mesh.get_local_rank(axis) for axis in MESH_AXES}
    ranks["cp"] = ranks["dp_shard"] % layout.cp
    control = made.once("control", lambda: host_group([range(world)]))
    made.once("failures", lambda: share_failures(control))
    explain_memory_errors()
    groups = {
        count: made.once((*key, count), partial(_consecutive_ranks, device_mesh, device, count))
        for count in replicas
    }
    mesh = Mesh(layout, device, ranks, device_mesh, control, groups)
    if layout.cp > 1:
        context, others = context_groups(mesh, layout.dp_shard, layout.cp)
        mesh = replace(
            mesh, context=context, whole_sequences=others if layout.asked("dp_shard") > 1 else None
        )
    if layout.ep > 1:
        mesh = _with_experts(mesh, made)
    if layout.pp > 1:
        mesh = _with_stages(_with_ties(mesh, made, ties), made, neighbours)
    mesh = made.latest = replace(mesh, sharing=_ranks_of_one_batch(mesh, made))
    return mesh


def add_ties(mesh: Mesh, ties: Sequence[tuple[int, ...]]) -> None:
    """Add to a mesh the groups of pipeline ranks that hold the same adapter tensor; collective."""
    if mesh.layout.pp > 1:
        more = _with_ties(mesh, made_out_of(dist.group.WORLD), ties)
        mesh.ties.update(more.ties)
        mesh.tie_reports.update(more.tie_reports)


def latest_mesh() -> Mesh | None:
    """Return the mesh that was built last; ``None`` if none was built yet, and in a single process."""
    return made_out_of(dist.group.WORLD).latest if dist.is_initialized() else None


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
    made: Groups = made_out_of(dist.group.WORLD)
    assert mesh.device_mesh is not None
    key = (mesh.device.type, tuple(mesh.device_mesh.shape), "context", every, size)
    lines = mesh.device_mesh.mesh.movedim(MESH_AXES.index("dp_shard"), -1).unflatten(
        -1, (-1, every // size, size)
    )
    near = made.once(
        (*key, "near"),
        lambda: device_group(
            lines.flatten(0, -2).tolist(),
            mesh.device,
        ),
    )
    far = made.once(
        (*key, "far"),
        lambda: device_group(
            lines.movedim(-1, -2).flatten(0, -2).tolist(),
            mesh.device,
        ),
    )
    return near, far


def _with_experts(mesh: Mesh, made: "Groups") -> Mesh:
    """Return ``mesh`` with the device mesh over :data:`EXPERT_AXES` (for experts), and with its process groups."""
    layout = mesh.layout
    device = mesh.device
    shape = tuple(layout.size("expert_tp" if axis == "tp" else axis) for axis in EXPERT_AXES)
    key = (device.type, "experts", shape)
    expert_mesh: DeviceMesh = made.once(key, partial(_divided, device, shape, EXPERT_AXES))
    group = expert_mesh.get_group("ep")
    if device.type == "cpu":
        reports = group
    else:
        lines = (
            expert_mesh.mesh.movedim(EXPERT_AXES.index("ep"), -1).reshape(-1, layout.ep).tolist()
        )
        reports = made.once((*key, "reports"), lambda: host_group(lines))
    ranks = {**{axis: expert_mesh.get_local_rank(axis) for axis in EXPERT_AXES}, **mesh.ranks}
    return replace(mesh, ranks=ranks, expert_mesh=expert_mesh, expert_reports=reports)


def _with_ties(
    mesh: Mesh,
    made: "Groups",
    ties: Sequence[tuple[int, ...]],
) -> Mesh:
    """Return ``mesh`` with a group for each entry of ``ties``: the pipeline ranks that hold one tied tensor."""
    assert mesh.device_mesh is not None
    device = mesh.device
    groups = dict[Any, Any]()
    reports = dict[Any, Any]()
    for members in ties:
        columns = _columns(mesh.device_mesh, members)
        key = (device.type, tuple(mesh.device_mesh.shape), members)
        groups[members] = made.once(key, partial(device_group, columns, device))
        alone = device.type == "cpu"
        reports[members] = (
            groups[members] if alone else made.once((*key, "reports"), partial(host_group, columns))
        )
    own = [members for members in ties if mesh.pp_rank in members]
    return replace(
        mesh,
        ties={m: groups[m] for m in own},
        tie_reports={m: reports[m] for m in own},
    )


def _with_stages(mesh: Mesh, made: "Groups", neighbours: Sequence[Pair]) -> Mesh:
    """Return ``mesh`` with the groups of pipeline ranks: one for each pair of ``neighbours`` and direction, for
    tensors, and one of all stages, for small messages.
    """
    assert mesh.device_mesh is not None
    device_mesh = mesh.device_mesh
    layout = mesh.layout
    key = (mesh.device.type, tuple(layout.size(axis) for axis in MESH_AXES))
    every = tuple(range(layout.pp))
    reports = made.once((*key, "reports"), lambda: host_group(_columns(device_mesh, every)))
    ways = [way for a, b in neighbours for way in ((a, b), (b, a))]
    fresh = dict[
        Any, Any
    ]()  # without a flush, gradients stay in flight between calls, so each model needs groups of its own

    def kept(way: Pair) -> dict[Any, Any]:
        return made.made if layout.flushes or way[0] < way[1] else fresh

    for forward in (True, False):
        missing = [
            way
            for way in ways
            if (way[0] < way[1]) == forward and (*key, "way", way) not in kept(way)
        ]
        for pairs in rounds(missing):
            mine = device_group(
                [ranks for pair in pairs for ranks in _columns(device_mesh, pair)], mesh.device
            )
            for way in pairs:
                kept(way)[(*key, "way", way)] = mine if mesh.pp_rank in way else None
    streams = {way: group for way in ways if (group := kept(way)[(*key, "way", way)]) is not None}
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


def _columns(device_mesh: DeviceMesh, members: Sequence[int]) -> list[list[int]]:
    """Return, for each position within a stage (data and tensor coordinates), the global ranks that have this position
    on the pipeline ranks ``members``.
    """
    return [
        [column[member] for member in members] for column in device_mesh.mesh.flatten(1).T.tolist()
    ]


def _ranks_of_one_batch(mesh: Mesh, made: "Groups") -> dist.ProcessGroup | None:
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
    shape = tuple(layout.size(axis) for axis in MESH_AXES)
    return made.once(
        (mesh.device.type, shape, cp, "sharing"),
        lambda: host_group(lines),
    )
