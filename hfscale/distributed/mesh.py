"""The device mesh: the ranks of each axis and their process groups, as one rank sees them."""

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
"""The same ranks in the same order, divided for experts; ``tp`` has one rank where experts are not cut over it."""


@dataclass(frozen=True)
class Mesh:
    """The live counterpart of a layout, as this rank sees it."""

    layout: ParallelConfig  # the sizes
    device: torch.device  # this rank's device
    ranks: dict[str, int]  # this rank's coordinate on each axis
    # Over :data:`MESH_AXES`; ``None`` in a single process, like all groups.
    device_mesh: DeviceMesh | None = None
    # A gloo group over all ranks for barriers and small objects.
    control: dist.ProcessGroup | None = None
    # number of consecutive tensor ranks that hold the same shard -> their group, through this rank
    replicas: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    # pipeline ranks that hold one tied tensor -> their group, if this rank is one of them
    ties: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    # Theirs over gloo.
    tie_reports: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    # (from, to), neighbouring pipeline ranks, this one among them -> their group for transfers that way: a backend may
    # serialize the transfers of one group
    streams: dict[Pair, dist.ProcessGroup] = field(default_factory=dict)
    # The gloo group of this rank's pipeline, for small messages.
    reports: dist.ProcessGroup | None = None
    expert_reports: dist.ProcessGroup | None = None  # the gloo group of the expert ranks
    # The gloo group of the ranks that are given the same batch.
    sharing: dist.ProcessGroup | None = None
    # Over :data:`EXPERT_AXES`; ``None`` where experts are not spread.
    expert_mesh: DeviceMesh | None = None
    # The group of the context ranks, with pieces of the same sequences.
    context: dist.ProcessGroup | None = None
    # With ``cp``: the group of shard ranks with different ones.
    whole_sequences: dist.ProcessGroup | None = None

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
        """The group of the tensor ranks; ``None`` for one rank."""
        return self.group("tp")

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
        return self.expert_mesh, ranks if self.layout.expert_tp > 1 else {**ranks, "tp": 0}

    def free_axes(self, cuts: Sequence[Cut]) -> list[str]:
        """Return the axes of a stage along which ranks hold replicas of a parameter with these ``cuts``."""
        cut = {"pp", *(cut.axis for cut in cuts)}
        return [axis for axis in self.view(cuts)[1] if axis not in cut]

    def rank_at(
        self,
        cuts: Sequence[Cut],
        ranks: dict[str, int],
        stage: int,
    ) -> int:
        """Return the first global rank that holds the shard at ``ranks`` of a parameter, on pipeline rank ``stage``."""
        device_mesh, _ = self.view(cuts)
        assert device_mesh is not None
        names: Any = device_mesh.mesh_dim_names
        return int(
            self._tables[device_mesh][tuple({**ranks, "pp": stage}.get(name, 0) for name in names)]
        )

    @cached_property
    def _tables(self) -> dict[DeviceMesh, Any]:
        """The global ranks of both meshes as NumPy arrays, which are indexed much faster than tensors."""
        return {
            mesh: mesh.mesh.numpy()
            for mesh in (self.device_mesh, self.expert_mesh)
            if mesh is not None
        }

    def largest(self, *numbers: float) -> list[Any]:
        """Return the largest value of each number on any rank, over gloo; collective."""
        largest = torch.tensor(numbers)
        if self.control is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, self.control)
        return largest.tolist()

    def all_gather_object(self, value: Any, failure: str = "") -> list[Any]:
        """Return every rank's ``value``; collective. All raise :class:`RankFailedError` if a rank has a ``failure``."""
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
        """Groups to reduce over, one after the other, to sum over all distinct batches."""
        if self.context is None:
            return self.loss_groups
        return [*filter(None, [self.whole_sequences]), *self.groups("dp_replicate")]

    @cached_property
    def loss_groups(self) -> list[dist.ProcessGroup]:
        """Groups to reduce losses and numbers of labels and tokens over: all ranks with different tokens."""
        return self.groups("dp_shard", "dp_replicate")

    @cached_property
    def groups_of_terms(self) -> list[dist.ProcessGroup]:
        """Groups to reduce a step's loss over: :attr:`loss_groups`, and the pipeline stages."""
        return [*self.loss_groups, *self.groups("pp")]

    @property
    def speaks_for_stage(self) -> bool:
        """Return whether this is the first rank of its pipeline stage."""
        return not any(rank for axis, rank in self.ranks.items() if axis != "pp")

    @cached_property
    def speaks_for_batch(self) -> bool:
        """Return whether this is the first of the ranks that are given the same batch."""
        return self.pp_rank == self.tp_rank == self.cp_rank == 0

    @property
    def rank_in_stage(self) -> int:
        """This rank's index among those of its stage that are given the same batch; they hold different shards."""
        return self.cp_rank * self.layout.tp + self.ranks["tp"]

    @property
    def data_rank(self) -> int:
        """This rank's index among the :attr:`data_world` ranks with different tokens."""
        return self.ranks["dp_replicate"] * self.layout.dp_shard + self.ranks["dp_shard"]

    @property
    def batch_rank(self) -> int:
        """The index of this rank's distinct batch."""
        return self.data_rank // self.layout.cp

    @property
    def batch_world(self) -> int:
        """The number of distinct batches in one step."""
        return self.layout.batch_world

    @cached_property
    def data_world(self) -> int:
        """The number of ranks with different tokens, over which the data axes average gradients."""
        return self.layout.data_world
