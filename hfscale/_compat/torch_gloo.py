"""Create torch's gloo backends, and wait for gloo's threads; find the collectives that a process waits for, by torch's
flight recorder.

Read and run with torch 2.13 to 2.15. gloo's collectives are recorded, but not its sends and receives; NCCL's calls are
recorded if ``TORCH_FR_BUFFER_SIZE`` is not 0.
"""

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)
"""Messages of gloo's and NCCL's errors if another rank is gone; these errors have no type of their own."""


def is_connection_lost(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, means that another rank's process is gone."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST):
            return True
        error = error.__cause__ or error.__context__
    return False


class _OfOneDevice(dist.ProcessGroupGloo):
    """Create a gloo backend whose sockets share one thread with all other gloo groups of the process."""

    _device: Any = None

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False
    ) -> None:  # ``enable_reconfigure`` exists since torch 2.14
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        if enable_reconfigure:
            options.enable_reconfigure = True
        _OfOneDevice._device = _OfOneDevice._device or gloo.create_default_device()
        options._devices = [_OfOneDevice._device]
        super().__init__(store, rank, size, options)


def share_gloo_thread() -> None:
    """Let gloo groups created from now on share one thread; otherwise each group's thread wakes up 100
    times a second.
    """
    distributed_c10d.ProcessGroupGloo = _OfOneDevice  # type: ignore[misc, assignment]


def wait_for_gloo_threads(seconds: float = 5.0) -> None:
    """Wait until gloo's threads have released the tensors that they have sent, for at most ``seconds``. A thread that
    still holds a tensor when Python ends dies when it takes the GIL, so a successful run would end with SIGABRT
    (pytorch#190489). torch does not tell whether the threads are idle, but Linux does: they sleep, and were not woken
    while this thread slept without the GIL.
    """
    end = time.monotonic() + seconds
    before = None
    while time.monotonic() < end:
        time.sleep(0.002)
        now = _gloo_threads()
        if now == before and all(state == "S" for state, *_ in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """Map each gloo thread to its state and its numbers of context switches, voluntary and involuntary."""
    threads: dict[str, tuple[str, ...]] = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() != "pt_gloo_runloop":
                continue
            lines = (task / "status").read_text().splitlines()
        except OSError:  # the thread has ended
            continue
        fields = dict(line.split(":", 1) for line in lines)
        counts = (
            fields["voluntary_ctxt_switches"].strip(),
            fields["nonvoluntary_ctxt_switches"].strip(),
        )
        threads[task.name] = (fields["State"].split()[0], *counts)
    return threads


_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_c10d: Any = getattr(torch._C, "_distributed_c10d", None)
_groups: Any = distributed_c10d


@dataclass(frozen=True)
class UnderWay:
    """Describe a collective that has not finished: its name, process group and inputs, and the time of the call."""

    call: str  # the collective's name, such as ``all_reduce``
    group: str  # the name of its process group
    shapes: str  # dtypes and shapes of its inputs
    created: int  # time of the call, in nanoseconds since 1970


def collectives_under_way(leave_out: Iterable[int] = ()) -> list[UnderWay]:
    """Return this process's unfinished collectives, oldest first, except those of the threads ``leave_out``."""
    threads = {str(ident) for ident in leave_out}
    under_way = []
    for entries in _recorded():
        # NCCL records the sends and receives of a ``batch_isend_irecv`` without events (pytorch#137969). They have
        # ended if the next entry of their process group that is called ``coalesced`` has ended.
        batches_ended = set[str]()
        for entry in reversed(entries):
            group = str(entry["process_group"][0])
            ended = entry.get("retired") or entry.get("state") == "completed"
            if ended and str(entry["profiling_name"]).endswith(":coalesced"):
                batches_ended.add(group)
            ended = ended or (entry.get("is_p2p") and group in batches_ended)
            if ended or entry.get("thread_id") in threads:
                continue
            call = str(entry["profiling_name"]).partition(":")[2]
            shapes = ", ".join(
                f"{dtype} {shape}"
                for dtype, shape in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
            )
            under_way.append(UnderWay(call, group, shapes, int(entry["time_created_ns"])))
    return sorted(under_way, key=lambda entry: entry.created)


def _recorded() -> Iterator[Sequence[Any]]:
    """Yield the entries of each of torch's flight recorders, in call order."""
    for dump in filter(None, (getattr(_c10d, name, None) for name in _DUMPS)):
        told: Any = json.loads(dump(True, False) or "{}")
        yield told.get("entries", ())


Call = tuple[tuple[str, int, int], float]
"""A key that is the same on all ranks of a collective's group, and this rank's time of the call in seconds
since 1970.
"""


def recorded_calls() -> list[Call]:
    """Return the latest collectives of this process, as many as torch's flight recorders hold, in call order."""
    calls = []
    groups = dict[str, int]()
    for entry in (entry for entries in _recorded() for entry in entries if not entry.get("is_p2p")):
        name = str(entry["process_group"][0])
        if name not in groups:
            groups[name] = hash(tuple(ranks_of_group(name)))
        key = (name, groups[name], int(entry["collective_seq_id"]))
        calls.append((key, int(entry["time_created_ns"]) / 1e9))
    return calls


def ranks_of_group(name: str) -> list[int]:
    """Return the global ranks of the process group with this name; empty if there is no such group."""
    try:
        return list(dist.get_process_group_ranks(_groups._resolve_process_group(name)))
    except (LookupError, RuntimeError):
        return []


def own_store(prefix: str) -> Any:
    """Return a new connection, with ``prefix``, to the ``torch.distributed.Store`` by which the ranks met."""
    store: Any = _groups._get_default_store()
    # A new connection, because a blocking call would block all other users of the same connection.
    return _groups.PrefixStore(prefix, store.clone())


def frames_of_main_thread() -> list[FrameType]:
    """Return the main thread's stack, the innermost frame first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [] if frame is None else [seen for seen, _ in traceback.walk_stack(frame)]
