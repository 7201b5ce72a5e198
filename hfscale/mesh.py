"""Processes: which ranks form which axis. The only caller of ``init_device_mesh`` and ``init_process_group``."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .config import ParallelConfig, cpu_requested, local_rank, started_processes
from .errors import MeshError
from .plan import Cut
from .schedules import ASYNCHRONOUS

_MESH_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
_EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "tp")
"""The same ranks in the same order, divided as experts see them; ``tp`` has one rank where experts are whole."""


@dataclass(frozen=True)
class Mesh:
    """The live counterpart of a layout, as this rank sees it.

    Attributes:
        layout: the sizes.
        device: this rank's device.
        ranks: this rank's coordinate on each axis.
        device_mesh: torch's mesh over :data:`_MESH_AXES`; ``None`` in a single process without a process group.
        control: a gloo group over all ranks for barriers and small objects; ``None`` likewise.
        copies: how many consecutive tensor ranks -> the group of those that this rank is one of.
        ties: pipeline ranks that hold one tensor -> the group of them through this rank, where it is one of them.
        gradients: a second group over the pipeline ranks through this one; ``None`` where there is one rank.
        reports: a third, over gloo, for a few numbers.
        expert_mesh: torch's mesh over :data:`_EXPERT_AXES`; ``None`` where experts are not spread.
    """

    layout: ParallelConfig
    device: torch.device
    ranks: dict[str, int]
    device_mesh: DeviceMesh | None = None
    control: dist.ProcessGroup | None = None
    copies: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    ties: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    gradients: dist.ProcessGroup | None = None
    reports: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of ``axis`` through this rank; ``None`` where the axis has one rank."""
        if self.layout.size(axis) == 1 or self.device_mesh is None:
            return None
        if axis in _MESH_AXES:
            return self.device_mesh.get_group(axis)
        return None if self.expert_mesh is None else self.expert_mesh.get_group(axis)

    def groups(self, *axes: str) -> list[dist.ProcessGroup]:
        """The groups of those ``axes`` that have more than one rank, in order."""
        return [group for group in map(self.group, axes) if group is not None]

    def view(self, cuts: Sequence[Cut]) -> tuple[DeviceMesh | None, dict[str, int]]:
        """The division of the ranks that a parameter with these ``cuts`` follows, and this rank's coordinates in it."""
        if not any(cut.axis == "ep" for cut in cuts):
            return self.device_mesh, {axis: self.ranks[axis] for axis in _MESH_AXES}
        ranks = {axis: self.ranks[axis] for axis in _EXPERT_AXES}
        return self.expert_mesh, ranks if self.layout.size("expert_tp") > 1 else {**ranks, "tp": 0}

    def everyones(self, value: Any) -> list[Any]:
        """What every rank has, by rank, on every rank, each of which calls it."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.layout.total_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    @property
    def batch_groups(self) -> list[dist.ProcessGroup]:
        """Groups to reduce over, one after the other, to sum over all distinct batches."""
        return self.groups("dp_shard", "dp_replicate")

    @property
    def batch_rank(self) -> int:
        """Which distinct batch this rank gets."""
        return self.ranks["dp_replicate"] * self.layout.size("dp_shard") + self.ranks["dp_shard"]

    @property
    def batch_world(self) -> int:
        """How many distinct batches there are in one step."""
        return self.layout.batch_world


def build_mesh(layout: ParallelConfig, copies: Sequence[int] = (), ties: Sequence[tuple[int, ...]] = ()) -> Mesh:
    """Match the processes that were started with the layout, starting torch's process group if there is none.

    Args:
        copies: sizes of the groups of consecutive tensor ranks that are needed besides; the same on every rank, in the
            same order. Each divides ``tp_size``.
        ties: sets of pipeline ranks that need a group besides, likewise.

    Raises:
        MeshError: the number of processes is not ``layout.total_size``.
    """
    world = dist.get_world_size() if dist.is_initialized() else started_processes()
    if world != layout.total_size:
        raise MeshError(
            f"{layout.describe()} needs {layout.total_size} process(es) and {world} were started: launch with\n"
            f"  {launch_line(layout.total_size)}\n"
            f"or choose sizes whose product is {world}"
        )
    device = _device()
    if world == 1:
        return Mesh(layout, device, dict.fromkeys(_MESH_AXES, 0))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    made = _Groups.of_this_process()
    shape = tuple(layout.size(axis) for axis in _MESH_AXES)
    device_mesh = made.once(
        (device.type, shape), lambda: init_device_mesh(device.type, shape, mesh_dim_names=_MESH_AXES)
    )
    ranks = {axis: device_mesh.get_local_rank(axis) for axis in _MESH_AXES}
    expert_mesh = None
    if layout.size("ep") > 1:
        divided = tuple(layout.size("expert_tp" if axis == "tp" else axis) for axis in _EXPERT_AXES)
        expert_mesh = made.once(
            (device.type, "experts", divided),
            lambda: init_device_mesh(device.type, divided, mesh_dim_names=_EXPERT_AXES),
        )
        ranks = {**{axis: expert_mesh.get_local_rank(axis) for axis in _EXPERT_AXES}, **ranks}
    control = made.once("control", lambda: dist.new_group(backend="gloo"))
    groups = {
        count: made.once((device.type, shape, count), partial(_consecutive_ranks, device_mesh, count))
        for count in copies
    }
    tied = {
        members: found
        for members in ties
        if (found := made.once((device.type, shape, members), partial(_pipeline_ranks, device_mesh, members)))
    }
    gradients = reports = None
    if layout.size("pp") > 1:
        every = tuple(range(layout.size("pp")))
        gradients = made.once((device.type, shape, "gradients"), partial(_pipeline_ranks, device_mesh, every))
        if layout.pipeline_schedule in ASYNCHRONOUS:  # gradients are under way between calls: not another model's
            gradients = _pipeline_ranks(device_mesh, every)
        reports = made.once((device.type, shape, "reports"), partial(_pipeline_ranks, device_mesh, every, "gloo"))
    return Mesh(layout, device, ranks, device_mesh, control, groups, tied, gradients, reports, expert_mesh)


class _Groups:
    """What was made out of torch's process group, kept: a group holds threads and sockets, and a process may build many
    models in one layout.
    """

    _latest: "_Groups | None" = None

    def __init__(self, world: dist.ProcessGroup | None) -> None:
        self.world, self.made = world, dict[Any, Any]()

    @classmethod
    def of_this_process(cls) -> "_Groups":
        """Those of the process group that is alive now."""
        if cls._latest is None or cls._latest.world is not dist.group.WORLD:
            cls._latest = cls(dist.group.WORLD)
        return cls._latest

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` made for ``key``, made now if need be; the same calls in the same order on every rank."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


def _consecutive_ranks(device_mesh: DeviceMesh, count: int) -> dist.ProcessGroup:
    """The group of ``count`` consecutive tensor ranks that this rank is one of; tp4 in twos: ``{0, 1}``, ``{2, 3}``."""
    if count == device_mesh.size(len(_MESH_AXES) - 1):
        return device_mesh.get_group("tp")
    # Every rank takes part in making every group.
    made = [(members, dist.new_group(members)) for members in device_mesh.mesh.view(-1, count).tolist()]
    return next(group for members, group in made if dist.get_rank() in members)


def _pipeline_ranks(
    device_mesh: DeviceMesh, members: tuple[int, ...], backend: str | None = None
) -> dist.ProcessGroup | None:
    """The group of the pipeline ranks ``members`` through this rank; ``None`` where it is none of them."""
    mine = None
    for column in device_mesh.mesh.flatten(1).T.tolist():  # one per place within a stage
        ranks = [column[member] for member in members]
        group = dist.new_group(ranks, backend=backend)
        mine = group if dist.get_rank() in ranks else mine
    return mine


def launch_line(processes: int) -> str:
    """The command that starts ``processes`` ranks, with or without GPUs."""
    multi = "--multi_gpu " if processes > 1 else ""
    script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "YOUR_SCRIPT.py"
    return f"accelerate launch {multi}--num_processes {processes} {script}"


def _device() -> torch.device:
    if torch.cuda.is_available() and not cpu_requested():
        torch.cuda.set_device(local_rank())
        return torch.device("cuda", local_rank())
    return torch.device("cpu")
