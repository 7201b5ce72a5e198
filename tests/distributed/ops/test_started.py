"""Gathers and reduce-scatters along any dim, and by which collective each backend does them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hfscale.distributed.ops.collectives import (
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from hfscale.distributed.processes import backend_of
from hfscale.plan.cut import share_evenly
from hfscale.testing import RankPool, count_traffic

Pools = Callable[[int], RankPool]
# shape of the whole, dim: one sample and several, of lengths that divide and that do not, in front and behind
SHAPES = [
    ((1, 8, 3), 1),
    ((1, 7, 3), 1),
    ((2, 8, 3), 1),
    ((2, 7, 3), -2),
    ((8, 3), 0),
    ((7, 3), 0),
    ((2, 3, 8), -1),
]


class _Copies(TorchDispatchMode):
    """Lists what puts pieces together."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::cat", "aten::stack"):
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _exchanged(
    shapes: list[tuple[tuple[int, ...], int]],
) -> list[tuple[torch.Tensor, torch.Tensor, list[str]]]:
    world = dist.group.WORLD
    rank = dist.get_rank()
    size = dist.get_world_size()
    found = []
    for shape, dim in shapes:
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        lengths = share_evenly(shape[dim], size)
        with _Copies() as copies:
            own = whole.split(lengths, dim)[rank]
            gathered = start_all_gather(own, lengths, dim, world).result()
            partial = whole * (rank + 1)
            summed = start_reduce_scatter(partial, lengths, dim, world).result()
        assert torch.equal(partial, whole * (rank + 1))
        gathered.add_(0), summed.add_(0)  # as stock code may: neither is a view of another's memory
        found.append((gathered, summed, copies.found))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_shares_along_any_dim(pools: Pools, size: int) -> None:
    for rank, found in enumerate(pools(size).run(_exchanged, SHAPES)):
        for (shape, dim), (gathered, summed, copies) in zip(SHAPES, found, strict=True):
            whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
            assert torch.equal(gathered, whole)
            assert torch.equal(
                summed,
                (whole * (size * (size + 1) // 2)).split(share_evenly(shape[dim], size), dim)[rank],
            )
            in_order = (
                all(length == 1 for length in shape[: dim % len(shape)]) and shape[dim] % size == 0
            )
            assert bool(copies) == (not in_order), (shape, dim, copies)


@contextmanager
def _group(backend: str) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend=backend)
    try:
        yield group
        dist.barrier()  # the other rank may still be connecting, where nothing was sent
    finally:
        dist.destroy_process_group(group)


def _collectives(backend: str, device: str) -> tuple[str, list[str]]:
    with _group(backend) as group, FakeTensorMode() if device == "cuda" else torch.no_grad():
        # Large enough for what gloo does to large ones.
        x = torch.ones(1, 4, 1 << 14, device=device)
        with count_traffic() as traffic:
            start_reduce_scatter(x, [2, 2], 1, group).result()
            start_all_gather(x, [4, 4], 1, group).result()
            start_all_reduce(x.clone(), group).result()
        return backend_of(group, x.device), sorted(traffic.calls.elements())


GLOO = ["allreduce", "alltoall", "alltoall"]
OTHERS = ["allgather", "allreduce", "reduce_scatter"]


@pytest.mark.parametrize(
    ("backend", "device", "name", "expected"),
    [
        ("gloo", "cpu", "gloo", GLOO),
        ("cpu:gloo,cuda:fake", "cpu", "gloo", GLOO),
        ("cpu:gloo,cuda:fake", "cuda", "fake", OTHERS),
        ("cuda:fake", "cuda", "fake", OTHERS),
        ("cpu:gloo,meta:fake", "meta", "fake", OTHERS),
        ("fake", "cpu", "fake", OTHERS),
    ],
)
def test_the_backend_of_the_tensors_device_decides(
    pools: Pools, backend: str, device: str, name: str, expected: list[str]
) -> None:
    """The name of a group that serves several devices names none of them."""
    for found in pools(2).run(_collectives, backend, device):
        assert found == (name, expected)
