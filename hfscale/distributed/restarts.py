"""Start the ranks of a run again without imports: the process that a launcher starts for a rank imports everything
once, and forks the one that trains. Where one of those ends in failure, all end, and every parent forks another.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist

from .._compat.torch_device import accelerators
from ..config.environment import started_processes
from ..errors import ConfigError, check_count
from .processes import RESTARTS, has_agent_store

_LOOK, _GRACE, _REFUSED = 0.1, 5.0, 2  # seconds between looks, to say why it ends; the exit code of what fails again
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def restart_in_place(restarts: int = 100) -> None:
    """Fork a process that goes on from here, and again whenever one fails on some rank: so imports are made once.

    Call it on every rank, behind the imports and before anything else. Returns in the forked process; this one waits,
    passes signals on, and ends as it does. Exit code 2, of an error that would come again, ends all ranks.

    Args:
        restarts: how often, before the launcher's turn comes (``--max-restarts``).

    Raises:
        ConfigError: this process has started CUDA, threads or torch's process group, which a forked one cannot use; or
            there are several ranks, and neither torchrun nor accelerate launch has started them.
    """
    check_count("restarts", restarts, 0)
    if accelerators().is_initialized() or dist.is_initialized() or threading.active_count() > 1:
        raise ConfigError("restart_in_place must come before CUDA, threads and process groups: call it behind imports")
    world, outer = started_processes(), int(os.environ.get(RESTARTS, "0"))
    if world > 1 and not has_agent_store():
        raise ConfigError(f"restart_in_place needs torchrun or accelerate launch to start its {world} ranks")
    parent = _Parent(world, f"hfscale-restarts-{outer}")
    for attempt in range(restarts + 1):
        if parent.fork():
            os.environ[RESTARTS] = str(outer * 1000 + attempt)
            return
        code, again = parent.wait(attempt)
        if not again:
            break
    sys.exit(code if code >= 0 else 128 - code)


class _Parent:
    """Wait for the process that trains, together with the parents of the other ranks."""

    def __init__(self, world: int, name: str) -> None:
        self._world, self._child, self._stopped, self._store = world, 0, False, dist.HashStore()
        if world > 1:
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
            self._store: Any = dist.PrefixStore(name, store)
        self._before = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}

    def fork(self) -> bool:
        """Fork; return whether this is the new process."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._child = os.fork()
        if self._child:
            return False
        for number, handler in self._before.items():
            signal.signal(number, handler)
        with suppress(AttributeError):  # no Linux
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        return True

    def wait(self, attempt: int) -> tuple[int, bool]:
        """Return how the process of this rank ended, once all have, and whether to fork again."""
        count, code, heard = partial(self._count, attempt), None, 0.0
        while code is None or count("ended") < self._world:
            if code is None and (found := os.waitpid(self._child, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(found[1])
                refused = count("killed", code < 0) == 0 and code == _REFUSED  # or because of a rank that was killed
                count("final", self._stopped or refused)
                count("failed", code != 0)
                count("ended", True)
            elif code is None and count("failed"):
                heard = heard or time.monotonic()
                if time.monotonic() > heard + _GRACE:
                    os.kill(self._child, signal.SIGKILL)
            if code is not None and self._stopped:
                break
            time.sleep(_LOOK)
        return code, count("failed") > 0 and not count("final")

    def _count(self, attempt: int, what: str, more: bool = False) -> int:
        """Return for how many ranks something is so, with this one if ``more``."""
        return int(self._store.add(f"{what}-{attempt}", int(more)))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        with suppress(ProcessLookupError):
            os.kill(self._child, number)
