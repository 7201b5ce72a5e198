"""Devices, torch's process group, and how many groups of ranks there are."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import hfscale
from hfscale import MeshError, ParallelConfig
from hfscale.config.schedules import schedule_names
from hfscale.distributed import process_groups, processes
from hfscale.distributed.process_groups import build_mesh
from hfscale.distributed.processes import (
    TIMEOUT,
    backend_of,
    choose_device,
    device_group,
    host_group,
    rounds,
)
from hfscale.plan.stages import place_stages
from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"),
    [(8, "5", 5), (1, "5", 0), (2, "5", 1), (8, None, 3), (1, None, 3)],
    ids=["torchrun", "one visible GPU per process", "two", "no launcher", "no launcher, one GPU"],
)
def test_device_of_a_process(visible: int, local_rank: str | None, index: int) -> None:
    assert choose_device(visible, local_rank, current=lambda: 3) == index


def test_the_current_gpu_is_not_asked_for_in_vain() -> None:
    choose_device(
        8,
        "5",
        current=lambda: pytest.fail("this would start CUDA on the first GPU, in every process"),
    )


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_process_group_that_is_started(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **given: started.update(given, backend=backend)
    )
    monkeypatch.setattr(
        processes.atexit, "register", lambda function, *_: started.update(end=function)
    )
    processes.start(torch.device(device))
    expected = (
        {"backend": "gloo"}
        if device == "cpu"
        else {"backend": "nccl", "device_id": torch.device(device)}
    )
    assert started == {**expected, "timeout": timedelta(minutes=10), "end": processes._stop}


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(0, 1)], [[(0, 1)]]),
        ([(0, 1), (1, 2), (2, 3), (3, 4)], [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]),
        ([(0, 1), (1, 2), (2, 3), (0, 3)], [[(0, 1), (2, 3)], [(0, 3), (1, 2)]]),
        ([(0, 1), (1, 2), (0, 2)], [[(0, 1)], [(0, 2)], [(1, 2)]]),
    ],
    ids=["two", "chain", "ring", "odd ring"],
)
def test_rounds_of_disjoint_pairs(pairs: list[Any], expected: list[list[Any]]) -> None:
    assert rounds(pairs) == expected


@contextmanager
def fake_world(backend: str, size: int) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        backend, store=FakeStore(), rank=0, world_size=size, timeout=timedelta(minutes=7)
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_the_process_group_ends_with_the_process_that_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_world("fake", 2) as world:
        processes._stop(object())  # somebody else's by now
        assert dist.is_initialized()
        monkeypatch.setattr(processes.sys, "last_value", ValueError(), raising=False)
        processes._stop(world)  # an error ends this process: others may never come
        assert dist.is_initialized()
        monkeypatch.delattr(processes.sys, "last_value")
        processes._stop(world)
        assert not dist.is_initialized()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


@pytest.mark.parametrize("backend", ["fake", "cpu:fake,cuda:fake"])
def test_groups_serve_one_kind_of_device(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Also where the user's process group serves several, so that no group connects its ranks twice."""
    device, hosts, connected = torch.device("cuda", 0), list[Any](), list[Any]()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(process_groups, "own_device", lambda: device)
    monkeypatch.setattr(
        process_groups, "host_group", lambda parts: hosts.append([list(ranks) for ranks in parts])
    )
    layout = ParallelConfig(pp_size=2, dp_shard_size=2, tp_size=4, ep_size=4)
    for module in (process_groups, processes):
        monkeypatch.setattr(module, "connect", lambda group, device: connected.append(group))
    with fake_world(backend, 16):
        made = build_mesh(layout, replicas=(2,), ties=((0, 1),), neighbours=((0, 1),))
        groups = [
            *made.groups("pp", "dp_shard", "tp", "ep"),
            *made.replicas.values(),
            *made.ties.values(),
        ]
        groups += made.streams.values()
        assert {dist.get_backend(group) for group in groups} == {"fake"}
        assert {backend_of(group, device) for group in groups} == {"fake"}
        assert made.streams.keys() == {(0, 1), (1, 0)}
        assert set(connected) > {*groups}  # and those of the mesh of experts
        assert connected[-2:] == list(made.streams.values())
        assert len(groups) == 8
    # over gloo: all ranks once, and small groups for a few numbers
    # The last: ranks that are given the same batch.
    assert [len(parts[0]) for parts in hosts] == [
        16,
        4,
        2,
        2,
        8,
    ]


def test_pairs_are_split_off_where_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(processes, "_splits", lambda world, device: True)
    monkeypatch.setattr(dist, "split_group", lambda world, parts, timeout: calls.append(parts))
    monkeypatch.setattr(processes, "connect", lambda group, device: None)
    with fake_world("fake", 8):
        for pairs in rounds([(0, 1), (1, 2), (2, 3), (0, 3)]):
            device_group([[2 * a, 2 * b] for a, b in pairs], torch.device("cuda", 0))
    assert calls == [[[0, 2], [4, 6]], [[0, 6], [2, 4]]]  # one call for all pairs of a round


@pytest.mark.parametrize("outside", [None, -100])  # what torch returns there before 2.14, and since
def test_a_rank_outside_of_all_splits_has_no_group(
    outside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[Any] = []
    monkeypatch.setattr(processes, "_splits", lambda world, device: True)
    monkeypatch.setattr(dist, "split_group", lambda world, parts, timeout: outside)
    monkeypatch.setattr(processes, "connect", lambda group, device: connected.append(group))
    with fake_world("fake", 4) as world:
        assert device_group([[1, 2]], torch.device("cuda", 0)) is None
        assert connected == [world]


def test_only_a_world_of_one_backend_is_split() -> None:
    class World:
        bound_device_id: Any = torch.device("cuda", 0)

        def name(self) -> str:
            return "fake"

        supports_splitting = True
        perform_nocolor_split = None

        def _get_backend(self, device: torch.device) -> Any:
            return self

    world: Any = World()
    for backend, splits in (("fake", True), ("cpu:gloo,cuda:fake", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend", lambda group, backend=backend: backend)
            assert processes._splits(world, torch.device("cuda", 0)) == splits
            assert not processes._splits(world, torch.device("cpu"))


def test_a_world_that_somebody_else_started_is_bound_while_groups_are_split_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accelerate starts it without a device: it is connected once, before the first split, and left unbound."""
    device = torch.device("cuda", 0)
    calls = list[Any]()
    monkeypatch.setattr(processes, "_splits", lambda world, device: True)
    monkeypatch.setattr(processes, "connect", lambda group, device: calls.append(group))
    monkeypatch.setattr(
        dist,
        "split_group",
        lambda world, parts, timeout: calls.append((world.bound_device_id, parts)) or "part",
    )
    with fake_world("fake", 4) as world:
        assert [device_group(parts, device) for parts in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])] == [
            "part",
            "part",
        ]
        assert world.bound_device_id is None
        assert calls == [
            world,
            (device, [[0, 1], [2, 3]]),
            "part",
            (device, [[0, 2], [1, 3]]),
            "part",
        ]
        world.bound_device_id = device  # by the one who started it
        device_group([[0, 1, 2, 3]], device)
        assert world.bound_device_id == device
        assert calls.count(world) == 1


def _in_order() -> list[Any]:
    """Groups of ranks as this rank makes them and connects them, none of either within a step."""
    calls = list[Any]()
    all_reduce = dist.all_reduce
    new_groups = {module: module.new_group for module in (dist, dist.device_mesh)}

    def reduced(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if tensor.numel() == 1:
            calls.append(
                ("connected", tuple(dist.get_process_group_ranks(group or dist.group.WORLD)))
            )
        return all_reduce(tensor, op, group, async_op)

    with pytest.MonkeyPatch.context() as patch:
        groups = processes.Groups()  # not those that the pool's ranks have made already
        for module in (processes, process_groups):
            patch.setattr(module, "made_out_of", lambda _: groups)
        patch.setattr(dist, "all_reduce", reduced)
        for module, make in new_groups.items():
            patch.setattr(
                module,
                "new_group",
                lambda ranks, *a, make=make, **k: (
                    calls.append(tuple(ranks)) or make(ranks, *a, **k)
                ),
            )
        build_mesh(ParallelConfig(pp_size=2, dp_shard_size=2), neighbours=((0, 1),), ties=((0, 1),))
        made = len(calls)
        build_mesh(ParallelConfig(pp_size=2, dp_shard_size=2), neighbours=((0, 1),), ties=((0, 1),))
        assert len(calls) == made
    return calls


def test_groups_are_made_and_connected_in_one_order_on_all_ranks(pools: Pools) -> None:
    ranks = pools(4).run(_in_order)
    made = [[call for call in calls if call[0] != "connected"] for calls in ranks]
    assert made[0] == made[1] == made[2] == made[3]
    for rank, calls in enumerate(ranks):
        connected = [
            members for call, members in (each for each in calls if each[0] == "connected")
        ]
        pairs = [(rank, rank ^ 1), (rank, rank ^ 2)]  # of the stage; of the pipeline
        stage, pipeline = (tuple(sorted(pair)) for pair in pairs)
        assert connected == [pipeline, stage, *[pipeline] * 3]  # axes, the tied tensor, each way


def _made(schedules: tuple[str, ...]) -> tuple[list[int], list[tuple[int, int]]]:
    """Groups with this rank in them after each schedule's mesh, and the ways between this rank and others."""
    numbers = []
    ways = set()
    before = len(dist.distributed_c10d._world.pg_map)
    for schedule in (*schedules, *schedules):
        layout = ParallelConfig(pp_size=4, pipeline_schedule=schedule)
        ranks = place_stages(schedule, 4, int(layout.virtual_stages or 1))
        pairs = tuple(sorted({(min(pair), max(pair)) for pair in pairwise(ranks)} - {(3, 3)}))
        made = build_mesh(layout, neighbours=pairs)
        ways |= made.streams.keys()
        numbers.append(len(dist.distributed_c10d._world.pg_map) - before)
    return numbers, sorted(ways)


def test_groups_are_bounded_whatever_the_schedules(pools: Pools) -> None:
    """A way to and from each of two neighbours, made once."""
    schedules = tuple(name for name in schedule_names() if not name.startswith("pipedream"))
    for rank, (numbers, ways) in enumerate(pools(4).run(_made, schedules)):
        other = {(rank + 1) % 4, (rank - 1) % 4}
        assert set(ways) == {way for to in other for way in ((rank, to), (to, rank))}
        assert len(set(numbers[len(schedules) - 1 :])) == 1  # the second time, nothing is made
        assert numbers[-1] <= 4 + 1 + 1 + 4  # streams, control, reports, and the axes of the mesh


def _patience() -> tuple[list[timedelta], timedelta]:
    made = build_mesh(ParallelConfig(tp_size=2))
    cpu = torch.device("cpu")
    groups = [*made.groups("tp"), made.control, host_group([[0, 1]]), device_group([[0, 1]], cpu)]
    return [
        group._get_backend(cpu).options._timeout for group in groups if group
    ], processes._patience(cpu)


def test_groups_wait_as_long_as_the_process_group(pools: Pools) -> None:
    for found, world in pools(2).run(_patience):
        assert found == [world] * 4
        assert world != TIMEOUT  # the pool's own


def test_the_hosts_groups_are_not_split_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's process group is bound, ranks outside of a group would wait in a split that gloo never joins."""
    seen: list[Any] = []

    class World:
        bound_device_id: Any = torch.device("cuda", 0)

        def _get_backend(self, device: torch.device) -> Any:
            raise RuntimeError("NCCL's alone")

    world = World()
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(
        dist,
        "new_group",
        lambda ranks, backend, timeout: (
            seen.append((world.bound_device_id, backend, timeout)) or ranks
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes.dist, "group", type("group", (), {"WORLD": world}))
        assert host_group([[0, 1], [2, 3]]) == [2, 3]
    assert seen == [(None, "gloo", TIMEOUT)] * 2
    assert world.bound_device_id == torch.device("cuda", 0)


def test_the_first_layout_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [
        ParallelConfig(tp_size=2, pp_size=2),
        ParallelConfig(dp_shard_size=2),
        ParallelConfig(tp_size=2),
    ]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert hfscale.fitting_layout(layouts) is layouts[1]
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        MeshError, match=r"3 process\(es\) were started, but no given layout is for that number"
    ):
        hfscale.fitting_layout(layouts)


LETS_GO_SLOWLY = """
import os, sys, time, torch, torch.distributed as dist
from hfscale.distributed.processes import host_group

class Slow(torch.Tensor):
    def __del__(self):
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass

first = os.fork()  # what is imported is there
rank, store = int(first > 0), dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = host_group([[0, 1]])
time.sleep(0.3 * rank)  # so that rank 0 has put down what it sends before it is sent
dist.all_reduce(torch.zeros(3).as_subclass(Slow) if rank == 0 else torch.zeros(3), group=group, async_op=True)
dist.all_reduce(torch.zeros(3), group=group)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) if first else 0)
"""


def test_python_ends_behind_the_threads_of_gloo(tmp_path: Path) -> None:
    """One that still holds a tensor when Python ends kills the process, which had done its work (SIGABRT)."""
    command = [sys.executable, "-c", LETS_GO_SLOWLY, str(tmp_path / "store")]
    assert subprocess.run(command, check=False, timeout=100).returncode == 0
