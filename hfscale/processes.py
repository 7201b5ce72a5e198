"""The processes of one run: each one's device, torch's process group, and groups of some of them.

On GPUs torch's process group and all groups that carry tensors are NCCL's alone and bound to the device, so that they
are split off the first one's communicator. What the host has to say goes over gloo, in one group of all ranks and small
ones besides. A group made as ``"cpu:gloo,cuda:nccl"`` would connect its ranks twice.
"""

import atexit
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ._host.torch import backend_for, patience_of, set_patience
from ._host.torch_device import ACCELERATOR, accelerators, is_accelerator
from ._host.torch_gloo import is_connection_lost, wait_for_gloo_threads
from .config import ParallelConfig, cpu_requested, started_processes
from .errors import ConfigError, MeshError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others where hfscale starts torch's process group. Whoever wants another number starts
it first: ``torch.distributed.init_process_group(timeout=)``, or Accelerate's ``InitProcessGroupKwargs``."""

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_TRACEBACK = "HFSCALE_TRACEBACK"
_ENDING = 5.0  # seconds that a process may take to end once its connections are closed

Pair = tuple[int, int]


def own_device() -> torch.device:
    """This process's device, made the current one."""
    found = accelerators()
    if cpu_requested() or not found.is_available():
        return torch.device("cpu")
    index = choose_device(found.device_count(), os.environ.get("LOCAL_RANK"), found.current_device)
    found.set_device(index)
    return torch.device(ACCELERATOR, index)


def choose_device(visible: int, local_rank: str | None, current: Callable[[], int]) -> int:
    """Which of the ``visible`` GPUs is this process's: its own index on the machine, round and round, since launchers
    (Slurm, Ray) may show each process one GPU only; without an index, the one that the user has chosen.
    """
    return current() if local_rank is None else int(local_rank) % visible


def fitting_layout(layouts: Sequence[ParallelConfig]) -> ParallelConfig:
    """The first of ``layouts`` for as many processes as were started: for jobs that start again with those that are
    left when a machine is lost (``torchrun --nnodes 1:2 --rdzv_backend c10d``). States are read in any of them.

    Raises:
        ConfigError: ``layouts`` is no list of layouts.
        MeshError: none is for that many.
    """
    if not isinstance(layouts, Sequence) or not all(isinstance(each, ParallelConfig) for each in layouts):
        raise ConfigError(
            f"layouts={layouts!r} is impossible: pass a list, as [hfscale.ParallelConfig(tp_size=2), ...]"
        )
    world = dist.get_world_size() if dist.is_initialized() else started_processes()
    for layout in layouts:
        if layout.total_size == world:
            return layout
    wanted = ", ".join(f"{layout.describe()} ({layout.total_size})" for layout in layouts)
    raise MeshError(f"{world} process(es) were started, and the layouts are for others: {wanted or 'none is given'}")


def start(device: torch.device) -> None:
    """Start torch's process group, and end it when the process does."""
    _end_quietly()
    options: dict[str, Any] = {"timeout": TIMEOUT}
    if restarted():
        stores: Any = dist
        store = stores.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), started_processes(), False)
        # The launcher's store outlives its workers: without a prefix these would find the addresses of dead ones.
        options["store"] = stores.PrefixStore(f"start-{os.environ[_RESTARTS]}", store)
        options |= {"rank": int(os.environ["RANK"]), "world_size": started_processes()}
    if is_accelerator(device):
        dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
    atexit.register(_stop, dist.group.WORLD)


def know_processes(group: dist.ProcessGroup | None) -> None:
    """Let an error that another rank is gone say in one line which one, and how it ended; collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (_machine(), os.getpid()), group=group)
    before = sys.excepthook.before if isinstance(sys.excepthook, _LostRanks) else sys.excepthook
    sys.excepthook = _LostRanks(before, every)


def _machine() -> str:
    """Return what is the same for processes that see each other under ``/proc``."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return ""


class _LostRanks:
    """Shows an error that ends this process: of a lost connection, the rank that is gone instead of a traceback.

    Attributes:
        before: what shows all other errors.
        processes: by rank, its machine and the number of its process.
    """

    def __init__(self, before: Callable[..., Any], processes: list[tuple[str, int]]) -> None:
        self.before, self.processes = before, processes

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ended = self._ended() if is_connection_lost(error) else {}
        if ended:
            which = ", ".join(f"rank {rank} ended ({how})" for rank, how in ended.items())
            frame = traceback.extract_tb(trace, 1)[0]
            print(
                f"[rank{os.environ.get('RANK', '?')}]: hfscale: {which}, and this rank cannot go on without it: it was "
                f"at {frame.filename}, line {frame.lineno} ({_TRACEBACK}=1 shows where in all)",
                file=sys.stderr,
                flush=True,
            )
        if not ended or os.environ.get(_TRACEBACK) or set(ended.values()) == {"exit code 0"}:
            self.before(kind, error, trace)

    def _ended(self) -> dict[int, str]:
        """Return how ranks of this machine ended; those of others, and those that live, are left out."""
        machine, found = _machine(), dict[int, str]()
        end = time.monotonic() + _ENDING
        while machine and not found and time.monotonic() < end:
            time.sleep(0.01)  # a connection is closed before its process has ended
            here = ((rank, pid) for rank, (there, pid) in enumerate(self.processes) if there == machine)
            found = {rank: how for rank, pid in here if (how := _how_ended(pid))}
        return found


def _how_ended(pid: int) -> str:
    """Return with which signal or code a process ended; ``""`` for one that lives."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # its launcher has asked how already
        return "its launcher knows how"
    if state not in ("Z", "X"):
        return ""
    status = int(fields[-1])
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"


def restarted() -> bool:
    """Whether the launcher has started the ranks before, and they meet through what it keeps (``--max_restarts``)."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get(_RESTARTS, "0") != "0"


@cache
def _end_quietly() -> None:
    """Before Python ends, and behind :func:`_stop`, whoever started torch's process group."""
    atexit.register(wait_for_gloo_threads)


def _stop(started: object) -> None:
    # After an error the other ranks may never come to what this one still waits for: the launcher ends them.
    if dist.is_initialized() and dist.group.WORLD is started and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """``"gloo"``, ``"nccl"``, ...: what carries tensors on ``device`` within ``group``; ``""`` where nothing does.

    ``dist.get_backend`` says what a group was made with. Where that serves several kinds of devices it is
    ``"cpu:gloo,cuda:nccl"``, which equals ``"nccl"`` on none of them.
    """
    try:
        return str(backend_for(group, device).name())
    except RuntimeError:  # no backend for that kind of device
        return ""


def keep_patience(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let a group that others made wait as long as torch's process group does."""
    if backend_of(group, device) in ("nccl", "gloo"):  # torch knows how for these
        set_patience(group, _patience(device))


def device_group(parts: Sequence[Sequence[int]], device: torch.device) -> dist.ProcessGroup | None:
    """Of these disjoint sets of ranks, the group of the one that this rank is in, for tensors on ``device``.

    Every rank of the run calls it, with the same sets.
    """
    _end_quietly()
    world = dist.group.WORLD
    assert world is not None
    if _splits(world, device):
        lists = [list(ranks) for ranks in parts]
        group: dist.ProcessGroup | None = dist.split_group(world, lists, timeout=_patience(device))
        return group
    return _one_by_one(parts, backend_of(world, device), _patience(device))


def host_group(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """The same over gloo, for what the host has to say."""
    _end_quietly()
    world: Any = dist.group.WORLD
    # Where torch's process group is bound to a device, ranks outside of a new group wait in a split of its
    # communicator, which the members of a gloo group never join (pytorch#145376). A group that its members make alone
    # is no way out: its name has the number of groups that a rank is in, which differs.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return _one_by_one(parts, "gloo", _patience(torch.device("cpu")))
    finally:
        world.bound_device_id = bound


def _one_by_one(parts: Sequence[Sequence[int]], backend: str, patience: timedelta) -> dist.ProcessGroup | None:
    mine = None
    for ranks in parts:  # every rank takes part in making every group
        group = dist.new_group(list(ranks), backend=backend or None, timeout=patience)
        mine = group if dist.get_rank() in ranks else mine
    return mine


class Groups:
    """What was made out of torch's process group, kept: a group holds threads and sockets, and a process may build many
    models in one layout.
    """

    def __init__(self) -> None:
        self.made = dict[Any, Any]()
        self.latest: Any = None  # mesh

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` made for ``key``, made now if need be; the same calls in the same order on every rank."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


@lru_cache(maxsize=1)  # the latest process group's: those of one that was destroyed are of no use
def made_out_of(world: dist.ProcessGroup | None) -> Groups:
    """What is kept for as long as torch's process group is this one."""
    return Groups()


def rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs of ranks in groups of disjoint ones, few of them: of a chain, the even pairs and then the odd ones."""
    made: list[list[Pair]] = []
    for pair in sorted(pairs):
        free = (found for found in made if not any(set(pair) & set(other) for other in found))
        found = next(free, None)
        if found is None:
            made.append([pair])
        else:
            found.append(pair)
    return made


def _patience(device: torch.device) -> timedelta:
    world = dist.group.WORLD
    assert world is not None
    try:
        patience = patience_of(backend_for(world, device))
    except RuntimeError:  # not the world's kind of device
        patience = None
    return patience or TIMEOUT


def _splits(world: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether groups can be split off the world's communicator, which is connected already then."""
    if device.type == "cpu" or world.bound_device_id is None or dist.get_backend(world) != backend_of(world, device):
        return False
    return bool(getattr(backend_for(world, device), "supports_splitting", False)) and hasattr(dist, "split_group")
