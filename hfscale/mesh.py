"""The device mesh: the ranks of each axis and their process groups. The only caller of ``init_device_mesh``."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .config import ParallelConfig, started_processes
from .errors import MeshError, RankFailedError
from .plan import Cut
from .processes import (
    Groups,
    Pair,
    backend_of,
    device_group,
    host_group,
    keep_patience,
    know_processes,
    made_out_of,
    own_device,
    rounds,
    start,
)
from .schedules import ASYNCHRONOUS

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "tp")
"""The same ranks in the same order, divided for experts; ``tp`` has one rank where experts are not cut over it."""


@dataclass(frozen=True)
class Mesh:
    """The live counterpart of a layout, as this rank sees it.

    Attributes:
        layout: the sizes.
        device: this rank's device.
        ranks: this rank's coordinate on each axis.
        device_mesh: torch's mesh over :data:`MESH_AXES`; ``None`` in a single process, like all groups.
        control: a gloo group over all ranks for barriers and small objects.
        replicas: number of consecutive tensor ranks that hold the same shard -> their group, through this rank.
        ties: pipeline ranks that hold one tied tensor -> their group, if this rank is one of them.
        tie_reports: the same ranks -> their gloo group.
        streams: (from, to), neighbouring pipeline ranks, this one among them -> their group for transfers that way: a
            backend may serialize the transfers of one group.
        reports: the gloo group of this rank's pipeline, for small messages; ``None`` for one rank.
        expert_reports: the gloo group of the expert ranks.
        sharing: the gloo group of the ranks that are given the same batch.
        expert_mesh: torch's mesh over :data:`EXPERT_AXES`; ``None`` where experts are not spread.
        context: the group of the context ranks, which hold pieces of the same sequences; ``None`` without ``cp``.
        whole_sequences: the group of shard ranks with different sequences; ``None`` for one rank, or without ``cp``.
    """

    layout: ParallelConfig
    device: torch.device
    ranks: dict[str, int]
    device_mesh: DeviceMesh | None = None
    control: dist.ProcessGroup | None = None
    replicas: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    ties: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    tie_reports: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    streams: dict[Pair, dist.ProcessGroup] = field(default_factory=dict)
    reports: dist.ProcessGroup | None = None
    expert_reports: dist.ProcessGroup | None = None
    sharing: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None
    whole_sequences: dist.ProcessGroup | None = None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group of ``axis`` through this rank; ``None`` where the axis has one rank."""
        if self.layout.size(axis) == 1 or self.device_mesh is None:
            return None
        if axis == "cp":
            return self.context
        if axis in MESH_AXES:
            return self.device_mesh.get_group(axis)
        return None if self.expert_mesh is None else self.expert_mesh.get_group(axis)

    def groups(self, *axes: str) -> list[dist.ProcessGroup]:
        """Return the groups of those ``axes`` that have more than one rank, in order."""
        return [group for group in map(self.group, axes) if group is not None]

    def view(self, cuts: Sequence[Cut]) -> tuple[DeviceMesh | None, dict[str, int]]:
        """Return the device mesh for a parameter with these ``cuts``, and this rank's coordinates in it."""
        if not any(cut.axis == "ep" for cut in cuts):
            return self.device_mesh, {axis: self.ranks[axis] for axis in MESH_AXES}
        ranks = {axis: self.ranks[axis] for axis in EXPERT_AXES}
        return self.expert_mesh, ranks if self.layout.size("expert_tp") > 1 else {**ranks, "tp": 0}

    def all_gather_object(self, value: Any, failure: str = "") -> list[Any]:
        """Return every rank's ``value``, by rank; collective.

        Args:
            failure: a message if this rank failed and has no value: it is raised on every rank.

        Raises:
            RankFailedError: on every rank, if one has a failure.
        """
        every: list[Any] = [(value, failure)]
        if self.control is not None:
            every = [None] * self.layout.total_size
            dist.all_gather_object(every, (value, failure), group=self.control)
        if failures := {rank: text for rank, (_, text) in enumerate(every) if text}:
            raise RankFailedError("; ".join(f"rank {rank}: {text}" for rank, text in failures.items()), failures)
        return [value for value, _ in every]

    @property
    def batch_groups(self) -> list[dist.ProcessGroup]:
        """Groups to reduce over, one after the other, to sum over all distinct batches."""
        if self.context is None:
            return self.loss_groups
        return [*([] if self.whole_sequences is None else [self.whole_sequences]), *self.groups("dp_replicate")]

    @property
    def loss_groups(self) -> list[dist.ProcessGroup]:
        """Groups to reduce losses and numbers of labels and tokens over: all ranks with different tokens."""
        return self.groups("dp_shard", "dp_replicate")

    @property
    def speaks_for_stage(self) -> bool:
        """Return whether this is the first rank of its pipeline stage."""
        return not any(rank for axis, rank in self.ranks.items() if axis != "pp")

    @property
    def speaks_for_batch(self) -> bool:
        """Return whether this is the first of the ranks that are given the same batch."""
        return self.ranks["pp"] == self.ranks["tp"] == self.ranks["cp"] == 0

    @property
    def rank_in_stage(self) -> int:
        """This rank's index among those of its stage that are given the same batch; they hold different shards."""
        return self.ranks["cp"] * self.layout.size("tp") + self.ranks["tp"]

    @property
    def data_rank(self) -> int:
        """This rank's index among the :attr:`data_world` ranks with different tokens."""
        return self.ranks["dp_replicate"] * self.layout.size("dp_shard") + self.ranks["dp_shard"]

    @property
    def batch_rank(self) -> int:
        """The index of this rank's distinct batch."""
        return self.data_rank // self.layout.size("cp")

    @property
    def batch_world(self) -> int:
        """The number of distinct batches in one step."""
        return self.layout.batch_world

    @property
    def data_world(self) -> int:
        """The number of ranks with different tokens, over which the data axes average gradients."""
        return self.layout.data_world


def build_mesh(
    layout: ParallelConfig,
    replicas: Sequence[int] = (),
    ties: Sequence[tuple[int, ...]] = (),
    neighbours: Sequence[Pair] = (),
) -> Mesh:
    """Build the mesh of a layout, and start torch's process group if there is none.

    Args:
        replicas: sizes of further groups of consecutive tensor ranks; the same on every rank, in the same order.
        ties: sets of pipeline ranks that hold one tied tensor, likewise.
        neighbours: pairs of pipeline ranks that hold consecutive stages, likewise.

    Raises:
        MeshError: the number of processes is not ``layout.total_size``.
    """
    world = dist.get_world_size() if dist.is_initialized() else started_processes()
    if world != layout.total_size:
        raise MeshError(
            f"{layout.describe()} needs {layout.total_size} process(es) and {world} were started: launch with\n"
            f"  {launch_line(layout.total_size)}\nor choose sizes whose product is {world}"
        )
    device = own_device()
    if world == 1:
        return Mesh(layout, device, dict.fromkeys((*MESH_AXES, "cp"), 0))
    if not dist.is_initialized():
        start(device)
    made = made_out_of(dist.group.WORLD)
    shape = tuple(layout.size(axis) for axis in MESH_AXES)
    key = (device.type, shape)
    device_mesh = made.once(key, partial(_divided, device, shape, MESH_AXES))
    ranks = {axis: device_mesh.get_local_rank(axis) for axis in MESH_AXES}
    ranks["cp"] = ranks["dp_shard"] % layout.size("cp")
    control = made.once("control", lambda: host_group([range(world)]))
    made.once("processes", lambda: know_processes(control))
    groups = {
        count: made.once((*key, count), partial(_consecutive_ranks, device_mesh, device, count)) for count in replicas
    }
    mesh = Mesh(layout, device, ranks, device_mesh, control, groups)
    if layout.size("cp") > 1:
        mesh = _with_context(mesh, made)
    if layout.size("ep") > 1:
        mesh = _with_experts(mesh, made)
    if layout.size("pp") > 1:
        mesh = _with_stages(_with_ties(mesh, made, ties), made, neighbours)
    mesh = made.latest = replace(mesh, sharing=_ranks_of_one_batch(mesh, made))
    return mesh


def latest_mesh() -> Mesh | None:
    """Return the mesh of the model that was built last; ``None`` before the first one, and in a single process."""
    return made_out_of(dist.group.WORLD).latest if dist.is_initialized() else None


def _divided(device: torch.device, shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    world = dist.group.WORLD
    assert world is not None
    options: dict[str, Any] = {}
    if ":" in dist.get_backend(world) and (own := backend_of(world, device)):
        # The user's process group serves several kinds of devices: its subgroups need only one.
        options["backend_override"] = dict.fromkeys(axes, own)
    device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=axes, **options)
    for axis, size in zip(axes, shape, strict=True):
        if size > 1:
            keep_patience(device_mesh.get_group(axis), device)
    return device_mesh


def _with_context(mesh: Mesh, made: "Groups") -> Mesh:
    """Add the groups of context ranks, neighbours along the shard axis, and of ranks with different sequences."""
    context, others = _near_and_far(mesh, made, mesh.layout.size("dp_shard"), mesh.layout.size("cp"))
    return replace(mesh, context=context, whole_sequences=others if mesh.layout.asked("dp_shard") > 1 else None)


def context_groups(mesh: Mesh, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's group of ``size`` consecutive context ranks, and that of its peers in others; collective."""
    return _near_and_far(mesh, made_out_of(dist.group.WORLD), mesh.layout.size("cp"), size)


def _near_and_far(mesh: Mesh, made: "Groups", every: int, size: int) -> tuple[Any, Any]:
    """Split each ``every`` shard ranks into groups of ``size`` neighbours; return this rank's group and its peers'."""
    assert mesh.device_mesh is not None
    key = (mesh.device.type, tuple(mesh.device_mesh.shape), "context", every, size)
    lines = mesh.device_mesh.mesh.movedim(MESH_AXES.index("dp_shard"), -1).unflatten(-1, (-1, every // size, size))
    near = made.once((*key, "near"), lambda: device_group(lines.flatten(0, -2).tolist(), mesh.device))
    far = made.once((*key, "far"), lambda: device_group(lines.movedim(-1, -2).flatten(0, -2).tolist(), mesh.device))
    return near, far


def _with_experts(mesh: Mesh, made: "Groups") -> Mesh:
    """Add the device mesh over :data:`EXPERT_AXES` and its groups."""
    layout, device = mesh.layout, mesh.device
    shape = tuple(layout.size("expert_tp" if axis == "tp" else axis) for axis in EXPERT_AXES)
    key = (device.type, "experts", shape)
    expert_mesh: DeviceMesh = made.once(key, partial(_divided, device, shape, EXPERT_AXES))
    group = expert_mesh.get_group("ep")
    if device.type == "cpu":
        reports = group
    else:
        lines = expert_mesh.mesh.movedim(EXPERT_AXES.index("ep"), -1).reshape(-1, layout.size("ep")).tolist()
        reports = made.once((*key, "reports"), lambda: host_group(lines))
    ranks = {**{axis: expert_mesh.get_local_rank(axis) for axis in EXPERT_AXES}, **mesh.ranks}
    return replace(mesh, ranks=ranks, expert_mesh=expert_mesh, expert_reports=reports)


def _with_ties(mesh: Mesh, made: "Groups", ties: Sequence[tuple[int, ...]]) -> Mesh:
    """Add the groups of pipeline ranks that hold one tied tensor."""
    assert mesh.device_mesh is not None
    device, groups, reports = mesh.device, dict[Any, Any](), dict[Any, Any]()
    for members in ties:
        columns = _columns(mesh.device_mesh, members)
        key = (device.type, tuple(mesh.device_mesh.shape), members)
        groups[members] = made.once(key, partial(device_group, columns, device))
        alone = device.type == "cpu"
        reports[members] = groups[members] if alone else made.once((*key, "reports"), partial(host_group, columns))
    own = [members for members in ties if mesh.ranks["pp"] in members]
    return replace(mesh, ties={m: groups[m] for m in own}, tie_reports={m: reports[m] for m in own})


def _with_stages(mesh: Mesh, made: "Groups", neighbours: Sequence[Pair]) -> Mesh:
    """Add the groups through which pipeline ranks communicate."""
    assert mesh.device_mesh is not None
    device_mesh, layout = mesh.device_mesh, mesh.layout
    key = (mesh.device.type, tuple(layout.size(axis) for axis in MESH_AXES))
    every = tuple(range(layout.size("pp")))
    reports = made.once((*key, "reports"), lambda: host_group(_columns(device_mesh, every)))
    ways = [way for a, b in neighbours for way in ((a, b), (b, a))]
    fresh = dict[Any, Any]()  # without a flush, gradients are in flight between calls: a group for each model

    def kept(way: Pair) -> dict[Any, Any]:
        return fresh if layout.pipeline_schedule in ASYNCHRONOUS and way[0] > way[1] else made.made

    for forward in (True, False):
        missing = [way for way in ways if (way[0] < way[1]) == forward and (*key, "way", way) not in kept(way)]
        for pairs in rounds(missing):
            mine = _stream(device_mesh, mesh.device, pairs)
            for way in pairs:
                kept(way)[(*key, "way", way)] = mine if mesh.ranks["pp"] in way else None
    streams = {way: group for way in ways if (group := kept(way)[(*key, "way", way)]) is not None}
    return replace(mesh, streams=streams, reports=reports)


def _stream(device_mesh: DeviceMesh, device: torch.device, pairs: Sequence[Pair]) -> dist.ProcessGroup | None:
    """Make the groups of disjoint ``pairs`` of pipeline ranks; return the one that this rank is in."""
    group = device_group([ranks for pair in pairs for ranks in _columns(device_mesh, pair)], device)
    if group is not None:
        _warm_up(group, device)
    return group


def _warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect the ranks of the group now, rather than within a step: NCCL connects at the first call."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _consecutive_ranks(device_mesh: DeviceMesh, device: torch.device, count: int) -> dist.ProcessGroup:
    """Return the group of ``count`` consecutive tensor ranks around this one; tp4 in twos: ``{0, 1}``, ``{2, 3}``."""
    if count == device_mesh.size(len(MESH_AXES) - 1):
        return device_mesh.get_group("tp")
    group = device_group(device_mesh.mesh.view(-1, count).tolist(), device)
    assert group is not None
    return group


def _columns(device_mesh: DeviceMesh, members: Sequence[int]) -> list[list[int]]:
    """Return the global ranks of the pipeline ranks ``members``, one list for each position within a stage."""
    return [[column[member] for member in members] for column in device_mesh.mesh.flatten(1).T.tolist()]


def _ranks_of_one_batch(mesh: Mesh, made: "Groups") -> dist.ProcessGroup | None:
    """Return the gloo group of the pipeline, context and tensor ranks that are given the same batch as this rank."""
    layout, device_mesh, cp = mesh.layout, mesh.device_mesh, mesh.layout.size("cp")
    if layout.size("tp") == cp == 1 or device_mesh is None:
        return mesh.reports
    if layout.size("pp") == cp == 1 and mesh.device.type == "cpu":
        return mesh.group("tp")
    # pp, replicate, shard x cp, tp -> replicate, shard; pp, cp, tp
    lines = device_mesh.mesh.unflatten(2, (-1, cp)).movedim(0, 2).flatten(2).flatten(0, 1).tolist()
    shape = tuple(layout.size(axis) for axis in MESH_AXES)
    group: dist.ProcessGroup | None = made.once((mesh.device.type, shape, cp, "sharing"), lambda: host_group(lines))
    return group


def launch_line(processes: int) -> str:
    """Return the command that starts ``processes`` ranks, with or without GPUs."""
    multi = "--multi_gpu " if processes > 1 else ""
    script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "YOUR_SCRIPT.py"
    return f"accelerate launch {multi}--num_processes {processes} {script}"
