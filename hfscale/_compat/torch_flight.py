"""Find what a process waits for, by torch's flight recorder, group names, store, and the main thread's stack.

Read and run with torch 2.13. Gloo's collectives are recorded since about torch 2.8, its sends and receives are not;
NCCL's are if ``TORCH_FR_BUFFER_SIZE`` is not 0.
"""

import json
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_c10d: Any = getattr(torch._C, "_distributed_c10d", None)
_groups: Any = distributed_c10d


@dataclass(frozen=True)
class UnderWay:
    """Describe an unfinished collective."""

    call: str  # its name, as ``all_reduce``
    group: str  # the name of its group
    shapes: str  # dtypes and shapes of its inputs
    created: int  # time of the call, in nanoseconds since 1970


def collectives_under_way(leave_out: Iterable[int] = ()) -> list[UnderWay]:
    """Return this process's unfinished collectives, the oldest first; not those of the threads ``leave_out``."""
    threads, found = {str(ident) for ident in leave_out}, []
    for dump in filter(None, (getattr(_c10d, name, None) for name in _DUMPS)):
        told: Any = json.loads(dump(True, False) or "{}")
        for entry in _unfinished(told.get("entries", ())):
            if entry.get("thread_id") in threads:
                continue
            call = str(entry["profiling_name"]).partition(":")[2]
            shapes = ", ".join(
                f"{dtype} {shape}" for dtype, shape in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
            )
            found.append(UnderWay(call, str(entry["process_group"][0]), shapes, int(entry["time_created_ns"])))
    return sorted(found, key=lambda entry: entry.created)


def _unfinished(entries: Sequence[Any]) -> list[Any]:
    """Return the ``entries``, in call order, that have not ended; halves of a ``batch_isend_irecv``, which NCCL records
    without events (pytorch#137969), have ended with the next entry called ``coalesced`` of their group.
    """
    found, batches_ended = [], set[str]()
    for entry in reversed(entries):
        group, ended = str(entry["process_group"][0]), entry.get("retired") or entry.get("state") == "completed"
        if ended and str(entry["profiling_name"]).endswith(":coalesced"):
            batches_ended.add(group)
        if not ended and not (entry.get("is_p2p") and group in batches_ended):
            found.append(entry)
    return found


def ranks_of_group(name: str) -> list[int]:
    """Return the global ranks of the group of that name; none if there is no such group."""
    try:
        return list(dist.get_process_group_ranks(_groups._resolve_process_group(name)))
    except (LookupError, RuntimeError):
        return []


def own_store(prefix: str) -> Any:
    """Return a new connection to the ``torch.distributed.Store`` where the ranks met, with ``prefix``."""
    store: Any = _groups._get_default_store()
    # A blocking call holds up all other users of its connection.
    return _groups.PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)


def frames_of_main_thread() -> list[FrameType]:
    """Return the main thread's stack, the innermost frame first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
