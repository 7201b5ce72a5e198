"""The processes of one run: each one's device, torch's process group, and subgroups of it.

On GPUs torch's process group and all groups that carry tensors are NCCL's alone and bound to the device, so that they
are split off the first one's communicator. Python objects and small messages go over gloo, in one group of all ranks
and small ones besides. A group made as ``"cpu:gloo,cuda:nccl"`` would connect its ranks twice.
"""

import atexit
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist

from .._compat.torch import backend_for, patience_of, set_timeout
from .._compat.torch_device import ACCELERATOR, accelerators, is_accelerator
from .._compat.torch_gloo import wait_for_gloo_threads
from ..config.environment import cpu_requested, started_processes
from ..config.parallel import ParallelConfig
from ..errors import ConfigError, MeshError

TIMEOUT = timedelta(minutes=10)
"""Timeout of torch's process group where hfscale starts it. For another one start the group first:
``torch.distributed.init_process_group(timeout=)``, or Accelerate's ``InitProcessGroupKwargs``.
"""

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_LOOK = 0.02  # seconds between looks

Pair = tuple[int, int]


def own_device() -> torch.device:
    """Return this process's device, and make it the current one."""
    devices = accelerators()
    if cpu_requested() or not devices.is_available():
        return torch.device("cpu")
    index = choose_device(
        devices.device_count(), os.environ.get("LOCAL_RANK"), devices.current_device
    )
    devices.set_device(index)
    return torch.device(ACCELERATOR, index)


def choose_device(
    visible: int,
    local_rank: str | None,
    current: Callable[[], int],
) -> int:
    """Return this process's GPU: its local rank, modulo those ``visible`` (one, under Slurm), or the user's choice."""
    return current() if local_rank is None else int(local_rank) % visible


def renew_thread_pool() -> None:
    """Make torch's pool of threads anew in a process that was forked, before several threads ask for it at once.

    A fork leaves the parent's pool without threads, and the first to ask replaces it. Autograd has a thread per device,
    which all ask as they start: one that comes in between finds no pool, and torch ends the process ("Invalid thread
    pool!").
    """
    torch.set_num_threads(torch.get_num_threads())


def fitting_layout(layouts: Sequence[ParallelConfig]) -> ParallelConfig:
    """Return the first of ``layouts`` that fits the number of started processes.

    For jobs that restart with fewer processes when a machine is lost (``torchrun --nnodes 1:2 --rdzv_backend c10d``): a
    state can be loaded in any layout.

    Raises:
        ConfigError: ``layouts`` is no list of layouts.
        MeshError: none is for that many.
    """
    if not isinstance(layouts, Sequence) or not all(
        isinstance(each, ParallelConfig) for each in layouts
    ):
        raise ConfigError(
            f"layouts={layouts!r} is invalid: pass a list, as [hfscale.ParallelConfig(tp_size=2), ...]"
        )
    world = dist.get_world_size() if dist.is_initialized() else started_processes()
    for layout in layouts:
        if layout.total_size == world:
            return layout
    wanted = ", ".join(f"{layout.describe()} ({layout.total_size})" for layout in layouts)
    raise MeshError(
        f"{world} process(es) were started, and the layouts are for others: {wanted or 'none is given'}"
    )


def stay_on_this_machine() -> None:
    """Let gloo listen on the loopback where a launcher says that all ranks are here, and no interface was chosen."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")
    if here and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def start(device: torch.device, timeout: timedelta = TIMEOUT) -> None:
    """Start torch's process group, and end it when the process does."""
    _end_quietly()
    options: dict[str, Any] = {"timeout": timeout}
    if met_before():
        store = store_of_ranks("hfscale-start")
        options |= {
            "store": store,
            "rank": int(os.environ["RANK"]),
            "world_size": started_processes(),
        }
    options |= {"device_id": device} if is_accelerator(device) else {}
    dist.init_process_group(dist.get_default_backend_for_device(device), **options)
    atexit.register(_stop, dist.group.WORLD)


def restarted() -> bool:
    """Return whether the launcher has restarted the ranks (``--max_restarts``), which meet through its store."""
    return has_agent_store() and os.environ.get(RESTARTS, "0") != "0"


def met_before() -> bool:
    """Return whether the launcher's store may have what ranks before these wrote: restarted here, or on other hosts."""
    return has_agent_store() and (restarted() or os.environ.get("GROUP_WORLD_SIZE", "1") != "1")


def has_agent_store() -> bool:
    """Return whether the launcher has a store, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_ranks(name: str) -> dist.Store:
    """Return a part of the launcher's store that is these ranks' alone; collective over all that were started.

    The store has what dead ranks wrote, and launchers count restarts each for itself: one of a host that came back
    begins anew. So the first rank draws a prefix, and tells it to each rank under how often that rank has come::

        rank 3: come-3 += 1 (is 5 now)    rank 0: told-3-5 = prefix    rank 3: heard-3-prefix
    """
    rank = int(os.environ["RANK"])
    prefix = secrets.token_hex(8)
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT))
    come = store.add(f"come-{rank}", 1)
    end = time.monotonic() + TIMEOUT.total_seconds()
    if rank:
        prefix = store.get(f"told-{rank}-{come}").decode()
        store.set(f"heard-{rank}-{prefix}", "")
    waiting = set() if rank else {*range(1, started_processes())}
    while waiting:
        for other in waiting:
            store.set(f"told-{other}-{store.add(f'come-{other}', 0)}", prefix)
        waiting = {other for other in waiting if not store.check([f"heard-{other}-{prefix}"])}
        if time.monotonic() > end:
            raise MeshError(
                f"ranks {sorted(waiting)} did not come within {TIMEOUT}: look at what they wait for"
            )
        time.sleep(_LOOK * bool(waiting))
    return dist.PrefixStore(prefix, store)


@cache
def _end_quietly() -> None:
    """Wait for gloo's threads before Python ends, after :func:`_stop`, even if the user started the process group."""
    atexit.register(wait_for_gloo_threads)


def _stop(started: object) -> None:
    # After an error the other ranks may never come to what this one still waits for: the launcher ends them.
    if dist.is_initialized() and dist.group.WORLD is started and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend of a group for tensors on ``device``; ``dist.get_backend`` may name several. ``""``: none."""
    try:
        return str(backend_for(group, device).name())
    except RuntimeError:  # no backend for that kind of device
        return ""


def keep_patience(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give a group that hfscale did not create the timeout of torch's process group."""
    if backend_of(group, device) in ("nccl", "gloo"):  # torch knows how for these
        set_timeout(_patience(device), group)


def device_group(parts: Sequence[Sequence[int]], device: torch.device) -> dist.ProcessGroup | None:
    """Make a group of each of these disjoint sets of ranks for tensors on ``device``; return this rank's."""
    _end_quietly()
    world: Any = dist.group.WORLD
    with bound(device) as splits:
        if splits:
            made: Any = dist.split_group(
                world, [list(ranks) for ranks in parts], timeout=_patience(device)
            )
            # Other ranks get None, and since torch 2.14 a number, as `new_group` returns.
            mine = made if any(dist.get_rank() in ranks for ranks in parts) else None
        else:
            mine = _one_by_one(parts, backend_of(world, device), _patience(device))
    if mine is not None:
        connect(mine, device)
    return mine


@contextmanager
def bound(device: torch.device) -> Iterator[bool]:
    """Bind torch's process group to ``device`` inside the ``with`` block, and connect it; yield whether groups can be
    split off it. Not for longer: gloo groups of a user's own might then wait forever (see :func:`host_group`).
    """
    world: Any = dist.group.WORLD
    before = world.bound_device_id
    splits = _splits(world, device)
    if splits and before is None:
        made_out_of(world).once("connected", lambda: connect(world, device))
        world.bound_device_id = device
    try:
        yield splits
    finally:
        world.bound_device_id = before


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect the ranks of the group now, rather than within a step: NCCL connects at the first call."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def host_group(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Make a gloo group of each of these disjoint sets of ranks, for objects and small messages; return this rank's."""
    _end_quietly()
    world: Any = dist.group.WORLD
    # Where torch's process group is bound to a device, ranks outside of a new group wait in a split of its
    # communicator, which the members of a gloo group never join (pytorch#145376). A group that its members make alone
    # is no way out: its name has the number of groups that a rank is in, which differs.
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        return _one_by_one(parts, "gloo", _patience(torch.device("cpu")))
    finally:
        world.bound_device_id = bound


def _one_by_one(
    parts: Sequence[Sequence[int]], backend: str, patience: timedelta
) -> dist.ProcessGroup | None:
    mine: dist.ProcessGroup | None = None
    for ranks in parts:  # every rank takes part in making every group
        group: Any = dist.new_group(list(ranks), backend=backend or None, timeout=patience)
        mine = group if dist.get_rank() in ranks else mine
    return mine


class Groups:
    """Cache of groups and meshes made from torch's process group, for all models: a group holds threads and sockets."""

    def __init__(self) -> None:
        self.made = dict[Any, Any]()
        self.latest: Any = None  # mesh

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned for ``key``, calling it the first time; all ranks call in the same order."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


@lru_cache(maxsize=1)  # the latest process group's: groups of a destroyed one are of no use
def made_out_of(world: dist.ProcessGroup | None) -> Groups:
    """Return the cache of groups that lives as long as torch's process group is this one."""
    return Groups()


def rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Partition pairs of ranks into few lists of disjoint ones: of a chain, the even pairs and then the odd ones."""
    made: list[list[Pair]] = []
    for pair in sorted(pairs):
        free = (
            pairs_at_once
            for pairs_at_once in made
            if not any(set(pair) & set(other) for other in pairs_at_once)
        )
        pairs_at_once = next(free, None)
        if pairs_at_once is None:
            made.append([pair])
        else:
            pairs_at_once.append(pair)
    return made


def _patience(device: torch.device) -> timedelta:
    world: Any = dist.group.WORLD
    try:
        patience = patience_of(backend_for(world, device))
    except RuntimeError:  # not the world's kind of device
        patience = None
    return patience or TIMEOUT


def _splits(world: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether groups can be split off the default group's communicator, once it is bound and connected."""
    backend = backend_of(world, device)
    if device.type == "cpu" or backend == "gloo" or dist.get_backend(world) != backend:
        return False
    # torch has a rank outside of a new group call the second; its fake backend has the first alone since torch 2.14.
    kind = backend_for(world, device)
    return getattr(kind, "supports_splitting", False) and hasattr(kind, "perform_nocolor_split")
