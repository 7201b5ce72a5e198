"""What ``_compat/torch.py`` and ``_compat/torch_gloo.py`` rely on of process groups, their backends and recorders."""

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from .relied_on import found, relying

TIMEOUT = "torch.distributed.set_timeout or torch.distributed.distributed_c10d._set_pg_timeout"
relies_on = relying("torch_gloo.py")


@relying("torch.py")("torch.distributed.ProcessGroup._get_backend")
def test_a_group_has_a_backend_for_a_device(world_of_one: None) -> None:
    """``group._get_backend(device)`` returns the backend, and raises RuntimeError where there is none."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert isinstance(backend, dist.ProcessGroupGloo)
    with pytest.raises(RuntimeError):
        dist.group.WORLD._get_backend(torch.device("xpu"))


@relying("torch.py")(TIMEOUT, "torch.distributed.ProcessGroup:options._timeout")
def test_a_group_has_a_timeout(world_of_one: None) -> None:
    """A backend's ``options._timeout`` is how long its operations wait, and it can be set for a group later."""
    from torch.distributed import distributed_c10d

    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=7), dist.group.WORLD)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=7)


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")
@relying("torch.py")(
    "torch.distributed._functional_collectives.all_gather_tensor",
    "torch.distributed._functional_collectives.all_reduce",
    "torch.distributed._functional_collectives.reduce_scatter_tensor",
    "torch.distributed._functional_collectives.wait_tensor",
)
def test_collectives_return_their_results(world_of_one: None) -> None:
    """Functional collectives take a group, and return a new tensor that has to be waited for."""
    from torch.distributed import _functional_collectives as functional

    rows = torch.arange(4.0)[:, None]
    group = dist.group.WORLD
    for made in (
        functional.all_reduce(rows, "sum", group),
        functional.all_gather_tensor(rows, 0, group),
        functional.reduce_scatter_tensor(rows, "sum", 0, group),
    ):
        assert torch.equal(functional.wait_tensor(made), rows)


@relies_on(
    "torch.distributed.ProcessGroupGloo._Options:_timeout",
    "torch.distributed.ProcessGroupGloo._Options:_devices",
    "torch.distributed.ProcessGroupGloo.create_default_device",
    "torch.distributed.distributed_c10d.ProcessGroupGloo",
)
def test_gloo_is_made_by_a_class_that_may_be_another() -> None:
    """torch makes gloo's backend by ``distributed_c10d.ProcessGroupGloo``, as a subclass may be made: of a store, rank,
    size and options with ``_timeout`` and ``_devices``, of which several groups may share one.
    """
    from torch.distributed import distributed_c10d

    made = []

    class Gloo(dist.ProcessGroupGloo):
        def __init__(
            self,
            store: dist.Store,
            rank: int,
            size: int,
            timeout: timedelta,
            enable_reconfigure: bool = False,
        ) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
            made.append(timeout)
            super().__init__(store, rank, size, options)

    stock = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = Gloo
    try:
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=9)
        )
        dist.barrier()
        dist.destroy_process_group()
    finally:
        distributed_c10d.ProcessGroupGloo = stock
    assert made == [timedelta(seconds=9)]


@relies_on(
    "torch._C._distributed_c10d._dump_fr_trace_json or torch._C._distributed_c10d._dump_nccl_trace_json"
)
def test_collectives_are_recorded(world_of_one: None) -> None:
    """The flight recorder, as JSON, has an entry for each collective, with its call, group, inputs and time."""
    dump = found("torch._C._distributed_c10d._dump_fr_trace_json")
    dist.all_reduce(torch.ones(3))
    entry = json.loads(dump(True, False))["entries"][-1]
    assert entry["profiling_name"].partition(":")[2] == "all_reduce"
    assert entry["process_group"][0] == dist.group.WORLD.group_name
    assert entry["input_dtypes"] == ["Float"]
    assert entry["input_sizes"] == [[3]]
    assert {"time_created_ns", "collective_seq_id", "is_p2p", "retired", "state"} <= entry.keys()


@relies_on("torch.distributed.distributed_c10d._resolve_process_group")
def test_a_group_is_found_by_its_name(world_of_one: None) -> None:
    """``_resolve_process_group(name)`` returns the group; a name of none is a LookupError or RuntimeError."""
    from torch.distributed import distributed_c10d

    name = dist.group.WORLD.group_name
    group = distributed_c10d._resolve_process_group(name)
    assert dist.get_process_group_ranks(group) == [0]
    with pytest.raises((LookupError, RuntimeError)):
        distributed_c10d._resolve_process_group("no such group")


@relies_on("torch.distributed.distributed_c10d._get_default_store")
def test_the_ranks_share_a_store(world_of_one: None) -> None:
    """``_get_default_store()`` is the store where the ranks met, of which a store with a prefix can be made."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    own = distributed_c10d.PrefixStore(
        "hfscale", store.clone() if hasattr(store, "clone") else store
    )
    own.set("key", "value")
    assert own.get("key") == b"value"


@relies_on("sys._current_frames")
def test_the_stack_of_a_thread_is_found() -> None:
    """``sys._current_frames()`` maps a thread's ``ident`` to its innermost frame."""
    import sys
    import threading

    frame = sys._current_frames()[threading.get_ident()]
    assert frame.f_code.co_name == "test_the_stack_of_a_thread_is_found"
