"""Restart a run's ranks without repeating imports: parent processes import once, and fork the processes that train."""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..._compat.torch_device import accelerators
from ...config.environment import started_processes
from ...distributed.failures import CODE
from ...distributed.processes import (
    RESTARTS,
    has_agent_store,
    renew_thread_pool,
    store_of_ranks,
)
from ...errors import ConfigError, check_count

# Seconds between checks; seconds that ranks have to report an error before they are killed; the exit code of a run that
# raised for wrong options
_LOOK = 0.1
_GRACE = 5.0
_REFUSED = 2
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def restart_in_place(restarts: int = 100) -> None:
    """Fork a process that continues from this call, and fork another one whenever one fails on some rank.

    Call it on every rank, after the imports and before anything else. It returns in the forked process. The parent
    process waits, forwards signals, and ends with the same exit code. If ranks end with code 2 and no rank ends
    otherwise, the run was refused, and the ranks do not start again.

    Args:
        restarts: number of restarts before the launcher takes over (``--max-restarts``).

    Raises:
        ConfigError: this process has already started CUDA, threads or process groups, or the ranks were not started by
            torchrun or accelerate launch.
    """
    check_count("restarts", restarts, 0)
    if accelerators().is_initialized() or dist.is_initialized() or threading.active_count() > 1:
        raise ConfigError(
            "restart_in_place must be called before CUDA, other threads or process groups are started: call it right "
            "after the imports"
        )
    world = started_processes()
    outer = int(os.environ.get(RESTARTS, "0"))
    if world > 1 and not has_agent_store():
        raise ConfigError(
            f"restart_in_place needs torchrun or accelerate launch to start its {world} ranks"
        )
    store = store_of_ranks("hfscale-restarts") if world > 1 else dist.HashStore()
    code = 0
    for attempt in range(restarts + 1):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            with suppress(AttributeError):  # only Linux has it
                ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
            os.environ[RESTARTS] = str(outer * 1000 + attempt)
            renew_thread_pool()
            return
        code, again = _wait(child, dist.PrefixStore(str(attempt), store), world)
        if not again:
            break
    sys.exit(code if code >= 0 else 128 - code)


def _wait(child: int, store: Any, world: int) -> tuple[int, bool]:
    """Wait until the children of all ranks have ended; return the exit code of this rank's child, and whether to fork
    again.
    """

    def count(what: str, more: bool = False) -> int:
        return int(store.add(what, int(more)))

    def pass_on(number: int, _: Any) -> None:
        told.append(number)
        if code is None:  # the child has not ended
            os.kill(child, number)

    told = list[int]()
    code = None
    heard = 0.0
    late = False
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    while code is None or (count("ended") < world and not told):
        ended, status = os.waitpid(child, os.WNOHANG) if code is None else (0, 0)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            for what in _kinds_of_end(code, bool(told), late):
                count(what, True)
        elif count("failed"):
            heard = heard or time.monotonic()
            late = time.monotonic() - heard > _GRACE
            if _too_long(child, code, (time.monotonic() - heard) // _GRACE):
                told.append(count("final", True))
        time.sleep(_LOOK)
    for number, handler in before.items():
        signal.signal(number, handler)
    count("final", bool(told))  # counted even if the parent got the signal after the child ended
    # A failure of one rank may make other ranks end with code 2 (wrong options).
    refused = count("refused") and not count("broken")
    return code, count("failed") > 0 and not count("final") and not refused


def _too_long(child: int, code: int | None, graces: float) -> bool:
    """Kill a child that outlives another rank's failed child by a grace period (``graces`` is how many periods have
    passed); return whether this parent has waited so long that a machine must be gone.
    """
    if code is None and graces:
        os.kill(child, signal.SIGKILL)
    return code is not None and graces > 3


def _kinds_of_end(code: int, told: bool, late: bool) -> list[str]:
    """Return the names of the counters, shared by all ranks, that a child's end with exit ``code`` increases.

    ``told``: its parent got a signal; ``late``: it outlived other ranks' children.
    """
    broken = not late and code not in (0, _REFUSED, CODE)
    kinds = {
        "final": told,
        "refused": code == _REFUSED,
        "broken": broken,
        "failed": code != 0,
        "ended": True,
    }
    return [name for name, so in kinds.items() if so]
