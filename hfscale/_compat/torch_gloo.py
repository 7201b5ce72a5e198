"""Create torch's gloo backends, and wait for their threads; read and run with torch 2.11 to 2.13."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

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
"""Messages of gloo's and NCCL's errors, which have no type of their own, when another rank is gone."""


def is_connection_lost(error: BaseException | None) -> bool:
    """Return whether an error, or a cause of it, is that another rank's process is gone."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST):
            return True
        error = error.__cause__ or error.__context__
    return False


class _OfOneDevice(dist.ProcessGroupGloo):
    """Create a gloo backend whose sockets share one thread with those of all other groups of the process."""

    _device: Any = None

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [self._only_device()]
        super().__init__(store, rank, size, options)

    @classmethod
    def _only_device(cls) -> Any:
        cls._device = cls._device or dist.ProcessGroupGloo.create_default_device()
        return cls._device


def share_gloo_thread() -> None:
    """Let gloo groups that are created from now on share one thread. Each has its own otherwise, which wakes up a
    hundred times a second: most of the work in a process that makes hundreds of groups.
    """
    distributed_c10d.ProcessGroupGloo = _OfOneDevice  # type: ignore[misc]


def wait_for_gloo_threads(seconds: float = 5.0) -> None:
    """Wait until gloo's threads have released what they have sent, for at most ``seconds``. A thread that still holds a
    tensor when Python begins to end takes the GIL to release it, is ended by that in the middle of C++, and a
    successful run dies of SIGABRT (pytorch#190489). Torch does not tell when its threads are idle. Linux does: they
    sleep, and nothing has woken them while this thread slept without the GIL.
    """
    end, before = time.monotonic() + seconds, None
    while time.monotonic() < end:
        time.sleep(0.002)
        now = _gloo_threads()
        if now == before and all(state == "S" for state, *_ in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """Return, by thread, its state and how often it was switched out, voluntarily and not."""
    found: dict[str, tuple[str, ...]] = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() != "pt_gloo_runloop":
                continue
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":", 1) for line in lines)
        counts = (fields["voluntary_ctxt_switches"].strip(), fields["nonvoluntary_ctxt_switches"].strip())
        found[task.name] = (fields["State"].split()[0], *counts)
    return found
