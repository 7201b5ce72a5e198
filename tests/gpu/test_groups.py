"""A process group of one rank over NCCL: what it is made with, split into, and asked to do."""

import socket
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hfscale._compat.torch_gloo import collectives_under_way
from hfscale.distributed.ops.collectives import (
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from hfscale.distributed.processes import (
    TIMEOUT,
    backend_of,
    device_group,
    host_group,
    keep_patience,
    own_device,
    start,
)
from hfscale.testing import count_traffic

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    # The flight recorder, which the watchdog reads.
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "64")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, value)
    # A launcher that shows each process one GPU: the seventh process of the machine has the first one that it sees.
    monkeypatch.setenv("LOCAL_RANK", str(6 * torch.cuda.device_count()))
    found = own_device()
    start(found)
    yield found
    dist.destroy_process_group()


def test_groups_on_a_gpu(device: torch.device) -> None:
    world = dist.group.WORLD
    assert world is not None
    assert (device, torch.cuda.current_device()) == (torch.device("cuda", 0), 0)
    assert backend_of(world, device) == dist.get_backend(world) == "nccl"
    assert world.bound_device_id == device
    split = device_group([[0]], device)
    host = host_group([[0]])
    assert split is not None
    assert host is not None
    assert (backend_of(split, device), backend_of(host, torch.device("cpu"))) == ("nccl", "gloo")
    assert world.bound_device_id == device
    keep_patience(split, device)
    assert split._get_backend(device).options._timeout == TIMEOUT
    dist.all_reduce(torch.ones(1), group=host)
    x = torch.randn(1, 6, 1 << 14, device=device)
    with count_traffic() as traffic:
        assert torch.equal(start_reduce_scatter(x, [6], 1, split).result(), x)
        assert torch.equal(start_all_gather(x, [6], 1, split).result(), x)
        assert torch.equal(start_all_reduce(x.clone(), split).result(), x)
    assert dict(traffic.calls) == {"reduce_scatter": 1, "allgather": 1, "allreduce": 1}


def test_the_watchdog_sees_that_work_has_ended(device: torch.device) -> None:
    """Collectives, and the halves of a batch of transfers, which NCCL's recorder leaves open (pytorch#137969)."""
    x = torch.randn(1 << 14, device=device)
    y = torch.empty(1 << 14, device=device)
    dist.all_reduce(x)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)]
    ):
        work.wait()
    torch.cuda.synchronize()
    deadline = time.monotonic() + 5
    while (waiting := collectives_under_way()) and time.monotonic() < deadline:
        time.sleep(0.1)  # torch's own thread looks now and then
    assert not waiting
    assert torch.equal(x, y)
