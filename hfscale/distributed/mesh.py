"""Define the device mesh of a layout: which ranks are on each axis, and the process groups of one rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..config.parallel import ParallelConfig
from ..errors import RankFailedError
from ..plan import Cut
from .processes import Pair

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "tp")
"""Axes by which experts divide the ranks of a run, in the same order of ranks as the axes of other weights. ``tp`` has
size 1 if experts are not sharded over tensor ranks.
"""


@dataclass(frozen=True)
class Mesh:
    """Hold a layout's device mesh and process groups, and this rank's coordinates on the axes."""

    layout: ParallelConfig  # the size of each axis
    device: torch.device  # this rank's device
    ranks: dict[str, int]  # this rank's coordinate on each axis
    # The device mesh over :data:`MESH_AXES`. In a single process this and all groups are ``None``.
    device_mesh: DeviceMesh | None = None
    # A gloo group over all ranks for barriers and small objects.
    control: dist.ProcessGroup | None = None
    # number of consecutive tensor ranks that hold the same shard -> the group of those ranks that includes this rank
    replicas: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    # pipeline ranks that hold one tied tensor -> their group, if this rank is one of them
    ties: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    # pipeline ranks that hold one tied tensor (keys of ``ties``) -> their gloo group, for small messages
    tie_reports: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    # (sender, receiver) -> the group for transfers in this direction. The two are neighbouring pipeline ranks, and one
    # of them is this rank. There is a group per direction because a backend may serialize the transfers of one group.
    streams: dict[Pair, dist.ProcessGroup] = field(default_factory=dict)
    # The gloo group of this rank's pipeline, for small messages.
    reports: dist.ProcessGroup | None = None
    expert_reports: dist.ProcessGroup | None = None  # the gloo group of the expert ranks
    # The gloo group of the ranks that receive the same batch.
    sharing: dist.ProcessGroup | None = None
    # The device mesh over :data:`EXPERT_AXES`; ``None`` without expert parallelism.
    expert_mesh: DeviceMesh | None = None
    # The group of the context ranks, which hold different tokens of the same sequences; ``None`` without ``cp``.
    context: dist.ProcessGroup | None = None
    # With ``cp``: the group of the ``dp_shard`` ranks that hold different sequences.
    whole_sequences: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first one of every axis, which writes files and logs for all ranks."""
        return not any(self.ranks.values())

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return 0 if self.device_mesh is None else self.device_mesh.get_rank()

    @cached_property
    def pp_rank(self) -> int:
        """This rank's pipeline rank."""
        return self.ranks["pp"]

    @cached_property
    def cp_rank(self) -> int:
        """This rank's index among the context ranks of its sequences."""
        return self.ranks["cp"]

    @cached_property
    def tp_rank(self) -> int:
        """This rank's index among the tensor ranks of its batch."""
        return self.ranks["tp"]

    @cached_property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The group of the tensor ranks; ``None`` if there is one tensor rank."""
        return self.group("tp")

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group of this rank along ``axis``; ``None`` if the axis has size 1."""
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
        """Return the device mesh over which a parameter is sharded that ``cuts`` describe (for experts, the expert
        mesh), and this rank's coordinates in the mesh.
        """
        if not any(cut.axis == "ep" for cut in cuts):
            return self.device_mesh, {axis: self.ranks[axis] for axis in MESH_AXES}
        ranks = {axis: self.ranks[axis] for axis in EXPERT_AXES}
        return self.expert_mesh, ranks if self.layout.expert_tp > 1 else {**ranks, "tp": 0}

    def free_axes(self, cuts: Sequence[Cut]) -> list[str]:
        """Return the axes, other than pipeline, along which ranks hold the same shard of a parameter; ``cuts`` describe
        how it is sharded.
        """
        cut = {"pp", *(cut.axis for cut in cuts)}
        return [axis for axis in self.view(cuts)[1] if axis not in cut]

    def rank_at(
        self,
        cuts: Sequence[Cut],
        ranks: dict[str, int],
        stage: int,
    ) -> int:
        """Return the first global rank, on pipeline rank ``stage``, that holds a given shard of a parameter.

        Args:
            cuts: how the parameter is sharded: the dim and the axis of each division.
            ranks: the shard's coordinate on each axis over which the parameter is sharded.
            stage: the pipeline rank.
        """
        device_mesh, _ = self.view(cuts)
        assert device_mesh is not None
        names: Any = device_mesh.mesh_dim_names
        return int(
            self._tables[device_mesh][tuple({**ranks, "pp": stage}.get(name, 0) for name in names)]
        )

    @cached_property
    def _tables(self) -> dict[DeviceMesh, Any]:
        """The global ranks of the device mesh and of the expert mesh as NumPy arrays, which are indexed much faster
        than tensors.
        """
        return {
            mesh: mesh.mesh.numpy()
            for mesh in (self.device_mesh, self.expert_mesh)
            if mesh is not None
        }

    def largest(self, *numbers: float) -> list[Any]:
        """Return the maximum over all ranks of each of ``numbers``; a collective on the CPU, over gloo."""
        largest = torch.tensor(numbers)
        if self.control is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, self.control)
        return largest.tolist()

    def all_gather_object(self, value: Any, failure: str = "") -> list[Any]:
        """Return every rank's ``value``; collective. If any rank passes a text as ``failure``, all ranks raise
        :class:`RankFailedError` with it.
        """
        every: list[Any] = [(value, failure)]
        if self.control is not None:
            every = [None] * self.layout.total_size
            dist.all_gather_object(every, (value, failure), group=self.control)
        if failures := {rank: text for rank, (_, text) in enumerate(every) if text}:
            raise RankFailedError(
                "; ".join(f"rank {rank}: {text}" for rank, text in failures.items()), failures
            )
        return [value for value, _ in every]

    @cached_property
    def batch_groups(self) -> list[dist.ProcessGroup]:
        """The groups for a sum over all different batches: all-reduces over them, one after the other, count each batch
        once.
        """
        if self.context is None:
            return self.loss_groups
        return [*filter(None, [self.whole_sequences]), *self.groups("dp_replicate")]

    @cached_property
    def loss_groups(self) -> list[dist.ProcessGroup]:
        """The groups over which losses and numbers of tokens are summed; together they contain all ranks with different
        tokens.
        """
        return self.groups("dp_shard", "dp_replicate")

    @cached_property
    def groups_of_terms(self) -> list[dist.ProcessGroup]:
        """The groups over which the terms of a step's loss are summed: :attr:`loss_groups`, and the group of pipeline
        ranks.
        """
        return [*self.loss_groups, *self.groups("pp")]

    @property
    def speaks_for_stage(self) -> bool:
        """Return whether this is the first rank of its pipeline stage."""
        return not any(rank for axis, rank in self.ranks.items() if axis != "pp")

    @property
    def speaks_for_sequences(self) -> bool:
        """Return whether this is the first of the ranks that hold different tokens of the same sequences."""
        return self.cp_rank == 0

    @cached_property
    def speaks_for_batch(self) -> bool:
        """Return whether this is the first of the ranks that receive the same batch."""
        return self.pp_rank == self.tp_rank == self.cp_rank == 0

    @property
    def rank_in_stage(self) -> int:
        """This rank's index among the ranks that compute the same batch in the same pipeline stage: its context and
        tensor ranks.
        """
        return self.cp_rank * self.layout.tp + self.ranks["tp"]

    @property
    def data_rank(self) -> int:
        """This rank's index among the :attr:`data_world` ranks with different tokens."""
        return self.ranks["dp_replicate"] * self.layout.dp_shard + self.ranks["dp_shard"]

    @property
    def batch_rank(self) -> int:
        """The index of this rank's batch among the different batches of a step; ranks that differ only in pipeline,
        context or tensor rank have the same batch.
        """
        return self.data_rank // self.layout.cp

    @property
    def batch_world(self) -> int:
        """The number of different batches in one step; ranks that differ only in pipeline, context or tensor rank have
        the same batch.
        """
        return self.layout.batch_world

    @cached_property
    def data_world(self) -> int:
        """The number of ranks with different tokens: gradients are averaged over them."""
        return self.layout.data_world
