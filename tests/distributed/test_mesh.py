"""Which ranks get the same batch, which compute the same tokens, and which hold the same shards."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hfscale import MeshError, ParallelConfig
from hfscale.distributed.mesh import Mesh
from hfscale.distributed.process_groups import build_mesh, context_groups
from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]


def meshes(**sizes: int) -> list[Mesh]:
    """The mesh of every rank, in order, without processes."""
    layout = ParallelConfig(**sizes)
    axes = ("pp", "dp_replicate", "dp_shard", "tp")
    places = product(*(range(layout.size(axis)) for axis in axes))
    found = []
    for place in places:
        ranks = dict(zip(axes, place, strict=True))
        ranks["cp"] = ranks["dp_shard"] % layout.size("cp")
        found.append(Mesh(layout, torch.device("cpu"), ranks))
    return found


def test_ranks_of_one_sequence_get_one_batch_and_compute_other_tokens() -> None:
    every = meshes(pp_size=2, dp_replicate_size=2, dp_shard_size=3, cp_size=2, tp_size=2)
    assert len(every) == every[0].layout.total_size == 48
    assert {mesh.batch_rank for mesh in every} == set(range(every[0].batch_world)) == set(range(6))
    assert {mesh.data_rank for mesh in every} == set(range(every[0].data_world)) == set(range(12))
    for mesh in every:
        assert mesh.data_rank == 2 * mesh.batch_rank + mesh.ranks["cp"]
    for batch in range(6):
        sharing = [mesh for mesh in every if mesh.batch_rank == batch]
        assert len(sharing) == 2 * 2 * 2  # stages, context ranks, tensor ranks
        assert sum(mesh.speaks_for_batch for mesh in sharing) == 1
        in_stage = [mesh.rank_in_stage for mesh in sharing if mesh.ranks["pp"] == 0]
        assert sorted(in_stage) == [0, 1, 2, 3]
    assert sum(mesh.speaks_for_stage for mesh in every) == 2


def _sums(sizes: dict[str, int]) -> dict[str, Any]:
    """What each kind of group makes of ranks' numbers."""
    mesh = build_mesh(ParallelConfig(**sizes))
    found: dict[str, Any] = {"batch_rank": mesh.batch_rank, "data_rank": mesh.data_rank}
    for name, groups in (
        ("batches", mesh.batch_groups),
        ("losses", mesh.loss_groups),
        ("cp", mesh.groups("cp")),
    ):
        number = torch.tensor(10 ** dist.get_rank())
        for group in groups:
            dist.all_reduce(number, group=group)
        found[name] = int(number)
    found["sharing"] = (
        sorted(dist.get_process_group_ranks(mesh.sharing)) if mesh.sharing is not None else []
    )
    return found


def test_groups_of_context_ranks(pools: Pools) -> None:
    """Two batches of sequences that are cut in two: ranks 0 and 1 have the first."""
    found = pools(4).run(_sums, {"cp_size": 2, "dp_shard_size": 2})
    assert [each["batch_rank"] for each in found] == [0, 0, 1, 1]
    assert [each["data_rank"] for each in found] == [0, 1, 2, 3]
    assert [each["cp"] for each in found] == [11, 11, 1100, 1100]
    assert [each["losses"] for each in found] == [1111] * 4
    assert [each["batches"] for each in found] == [101, 1010, 101, 1010]
    assert [each["sharing"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_tensor_and_context_ranks_share_a_batch(pools: Pools) -> None:
    found = pools(4).run(_sums, {"cp_size": 2, "tp_size": 2})
    assert [each["sharing"] for each in found] == [[0, 1, 2, 3]] * 4
    assert [each["cp"] for each in found] == [101, 1010, 101, 1010]
    # One batch: nothing to sum over.
    assert [each["batches"] for each in found] == [
        1,
        10,
        100,
        1000,
    ]


def _near_and_far() -> tuple[list[int], list[int]]:
    near, far = context_groups(build_mesh(ParallelConfig(cp_size=4)), 4, 2)
    return dist.get_process_group_ranks(near), dist.get_process_group_ranks(far)


def test_groups_of_neighbours_and_the_ring_between_them(pools: Pools) -> None:
    assert pools(4).run(_near_and_far) == [
        ([0, 1], [0, 2]),
        ([0, 1], [1, 3]),
        ([2, 3], [0, 2]),
        ([2, 3], [1, 3]),
    ]


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(MeshError, match=r"tp2 x cp2 needs 4 process"):
        build_mesh(ParallelConfig(cp_size=2, tp_size=2))
