"""Choose each process's device, start torch's process group, and make subgroups of it.

On GPUs torch's process group and all groups that carry tensors use only NCCL and are bound to the device, so that new
groups are split off the first group's communicator. Python objects and small messages go over gloo, in one group of all
ranks and a few smaller groups. A group made with ``"cpu:gloo,cuda:nccl"`` would connect its ranks twice.
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
"""Timeout of torch's process group if hfscale starts it. To use another timeout, start the process group before hfscale
does: ``torch.distributed.init_process_group(timeout=)``, or Accelerate's ``InitProcessGroupKwargs``.
"""

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_LOOK = 0.02  # seconds between two reads of the launcher's store

Pair = tuple[int, int]


def own_device() -> torch.device:
    """Return this process's device; if it is a GPU, make it the current device."""
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
    """Return the index of this process's GPU: the local rank modulo the number of ``visible`` GPUs.
    Slurm may show one GPU to each process: its index is then 0.

    Without a local rank, keep the GPU that the user has made ``current``.
    """
    return current() if local_rank is None else int(local_rank) % visible


def renew_thread_pool() -> None:
    """Recreate torch's thread pool in a forked process, before several threads ask for the pool at once.

    A forked process inherits the parent's pool without its threads, and the first thread that asks replaces the pool.
    Autograd's threads, one per device, all ask when they start. A thread that asks during the replacement finds no
    pool, and torch then ends the process ("Invalid thread pool!").
    """
    torch.set_num_threads(torch.get_num_threads())


def fitting_layout(layouts: Sequence[ParallelConfig]) -> ParallelConfig:
    """Return the first of ``layouts`` that fits the number of started processes.

    Jobs that restart with fewer processes after a machine is lost (``torchrun --nnodes 1:2 --rdzv_backend c10d``) use
    this, because a saved state can be loaded in any layout.

    Raises:
        ConfigError: ``layouts`` is not a list of layouts.
        MeshError: no layout is for the number of started processes.
    """
    if not isinstance(layouts, Sequence) or not all(
        isinstance(each, ParallelConfig) for each in layouts
    ):
        raise ConfigError(
            f"layouts={layouts!r} is invalid: pass a list, for example [hfscale.ParallelConfig(tp_size=2), ...]"
        )
    world = dist.get_world_size() if dist.is_initialized() else started_processes()
    for layout in layouts:
        if layout.total_size == world:
            return layout
    wanted = ", ".join(f"{layout.describe()} ({layout.total_size})" for layout in layouts)
    raise MeshError(
        f"{world} process(es) were started, but no given layout is for that number: {wanted or 'the list is empty'}: "
        f"add a layout of {world} process(es), or start as many processes as one of the layouts needs"
    )


def stay_on_this_machine() -> None:
    """Let gloo use the loopback interface if all ranks run on this machine and the user chose no interface."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")
    if here and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def start(device: torch.device, timeout: timedelta = TIMEOUT) -> None:
    """Start torch's process group, and destroy it when the process ends."""
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
    """Return whether the launcher, if it holds the store of the rendezvous, has restarted the ranks
    (``--max_restarts``).
    """
    return has_agent_store() and os.environ.get(RESTARTS, "0") != "0"


def met_before() -> bool:
    """Return whether the launcher's store may hold entries of ranks that have ended: ranks were restarted on this host,
    or there are other hosts, where they may have been restarted.
    """
    return has_agent_store() and (restarted() or os.environ.get("GROUP_WORLD_SIZE", "1") != "1")


def has_agent_store() -> bool:
    """Return whether torch's launcher, not the first rank, holds the store of the rendezvous, which then outlives the
    ranks.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_ranks(name: str) -> dist.Store:
    """Return a view of the launcher's store under a prefix that only these ranks use; collective over all ranks.

    The store still holds entries of ranks that have ended. The restart count cannot tell old from new entries: each
    launcher counts its own restarts, and the launcher of a host that came back starts from zero. Therefore the first
    rank draws a random prefix, and writes the prefix for each rank, under a key with the number of starts of the rank::

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
                f"ranks {sorted(waiting)} did not connect to rank 0 within {TIMEOUT}: check in their logs that they "
                "were started, and what they wait for"
            )
        time.sleep(_LOOK * bool(waiting))
    return dist.PrefixStore(prefix, store)


@cache
def _end_quietly() -> None:
    """Wait for gloo's threads when Python ends, after the process group is destroyed, because threads that still run
    would end the process with an error; also if the user started the process group.
    """
    atexit.register(wait_for_gloo_threads)


def _stop(started: object) -> None:
    # After an error the other ranks may never reach the collectives that this rank waits for: the launcher ends them.
    if dist.is_initialized() and dist.group.WORLD is started and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that a group uses for tensors on ``device``, or ``""`` if it has none.

    ``dist.get_backend`` may name several backends at once.
    """
    try:
        return str(backend_for(group, device).name())
    except RuntimeError:  # the group has no backend for this kind of device
        return ""


def keep_patience(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give a group that hfscale did not create the timeout of torch's process group."""
    # torch can set the timeout of these backends only
    if backend_of(group, device) in ("nccl", "gloo"):
        set_timeout(_patience(device), group)


def device_group(parts: Sequence[Sequence[int]], device: torch.device) -> dist.ProcessGroup | None:
    """Make one group for each of these disjoint sets of ranks, for tensors on ``device``; return this rank's group."""
    _end_quietly()
    world: Any = dist.group.WORLD
    with bound(device) as splits:
        if splits:
            made: Any = dist.split_group(
                world, [list(ranks) for ranks in parts], timeout=_patience(device)
            )
            # Ranks in no set get None or, since torch 2.14, a number like the one that `new_group` returns.
            mine = made if any(dist.get_rank() in ranks for ranks in parts) else None
        else:
            mine = _one_by_one(parts, backend_of(world, device), _patience(device))
    if mine is not None:
        connect(mine, device)
    return mine


@contextmanager
def bound(device: torch.device) -> Iterator[bool]:
    """Bind torch's process group to ``device`` inside the ``with`` block, and connect its ranks.

    Yield whether groups can be split off the process group. The binding ends with the block because gloo groups that
    the user makes later might otherwise wait forever (see :func:`host_group`).
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
    """Connect the ranks of the group now: NCCL would otherwise connect at the first collective, within a step."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def host_group(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Make a gloo group for each of these disjoint sets of ranks, for objects and small messages.

    Return the group that contains this rank.
    """
    _end_quietly()
    world: Any = dist.group.WORLD
    # If torch's process group is bound to a device, ranks outside of a new group wait in a split of the communicator.
    # The members of a gloo group never join that split (pytorch#145376). Letting only the members make the group does
    # not help: its name contains the number of groups that a rank is in, and this number differs between ranks.
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
    """Cache groups and meshes that were made from torch's process group, so that all models share them: each group has
    threads and sockets.
    """

    def __init__(self) -> None:
        self.made = dict[Any, Any]()
        self.latest: Any = None  # the mesh that was built last

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, run only by the first call with ``key``; all ranks call in the same order."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


@lru_cache(maxsize=1)  # only for the current process group: groups of a destroyed one are of no use
def made_out_of(world: dist.ProcessGroup | None) -> Groups:
    """Return the cache of the groups that were made from this process group; another process group gets a new cache."""
    return Groups()


def rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Partition pairs of ranks into few lists of disjoint pairs, so that the groups of a list are made at once; for a
    chain, the even pairs and then the odd pairs.
    """
    made: list[list[Pair]] = []
    for pair in sorted(pairs):
        for at_once in made:
            if not any(set(pair) & set(other) for other in at_once):
                at_once.append(pair)
                break
        else:
            made.append([pair])
    return made


def _patience(device: torch.device) -> timedelta:
    world: Any = dist.group.WORLD
    try:
        patience = patience_of(backend_for(world, device))
    except RuntimeError:  # torch's process group has no backend for this kind of device
        patience = None
    return patience or TIMEOUT


def _splits(world: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether groups can be split off the default group's communicator after it is bound and connected."""
    backend = backend_of(world, device)
    if device.type == "cpu" or backend == "gloo" or dist.get_backend(world) != backend:
        return False
    # torch calls `perform_nocolor_split` on ranks outside of a new group; since torch 2.14 its fake backend has only
    # `supports_splitting`.
    kind = backend_for(world, device)
    return getattr(kind, "supports_splitting", False) and hasattr(kind, "perform_nocolor_split")
