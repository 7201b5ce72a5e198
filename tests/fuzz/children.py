"""Run functions in forked processes: nothing is imported anew, and the parent stays clean."""

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from hfscale.distributed.processes import renew_thread_pool

_GRACE_SECONDS = 3.0

Note = Callable[[str], None]


@dataclass
class Ended:
    """How a process ended.

    Attributes:
        phase: what it had come to.
        error: the type and the text of what it raised, or how it died; empty where it returned.
        refused: whether that was one of hfscale's own errors.
        trace: the whole traceback, or the stack of a process that did not return.
        hung: whether it had to be stopped.
    """

    phase: str
    error: str = ""
    refused: bool = False
    trace: str = ""
    hung: bool = False


def in_a_child(function: Callable[[Note], None], directory: Path, name: str) -> int:
    """Fork; the child calls ``function``, and notes phases and errors in files. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(file=2)
        renew_thread_pool()
        with open(directory / f"{name}.stack", "w") as stack:
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
            function(lambda phase: _write(directory / f"{name}.phase", phase))
        status = 0
    except BaseException as error:
        from hfscale.errors import HFScaleError

        kind = "refused" if isinstance(error, HFScaleError) else "error"
        _write(directory / f"{name}.{kind}", f"{type(error).__name__}: {error}")
        _write(directory / f"{name}.trace", traceback.format_exc())
    finally:
        os._exit(status)


def await_all(pids: dict[str, int], directory: Path, timeout: float) -> dict[str, Ended]:
    """Until all have ended; stops those that go on for long after one has failed, or after the timeout.

    A busy machine is no hang: whoever still computes when the time is up gets as much again, up to five times.
    """
    deadline = time.monotonic() + timeout
    running = dict(pids)
    found = dict[str, Ended]()
    extensions = 4
    used = 0.0
    while running:
        if time.monotonic() >= deadline:
            spent = sum(map(_seconds_of, running.values()))
            if (
                any(end.error for end in found.values())
                or not extensions
                or spent - used < 0.02 * timeout
            ):
                break
            deadline = time.monotonic() + timeout
            extensions = extensions - 1
            used = spent
        for name, pid in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[name]
                found[name] = _ended(name, directory, status)
                if found[name].error:  # the others may wait for it forever
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.005)
    for pid in running.values():
        os.kill(pid, signal.SIGUSR1)
    if running:
        time.sleep(0.3)
    for name, pid in running.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        stack = directory / f"{name}.stack"
        found[name] = Ended(
            _read(directory, name, "phase"), "did not return", False, stack.read_text(), hung=True
        )
    return found


def _seconds_of(pid: int) -> float:
    """Seconds of processor time; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def join_group(rank: int, world: int, directory: Path, timeout: float) -> None:
    """Make this process one rank of a gloo group that meets in a file."""
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    # Accelerate insists on an address, also where the process group exists; nothing listens there.
    os.environ.update(
        ACCELERATE_USE_CPU="1", MASTER_ADDR="localhost", MASTER_PORT="29500", HFSCALE_FAILURES="0"
    )
    store = torch.distributed.FileStore(str(directory / "store"), world)  # type: ignore[attr-defined]
    # A hang is reported by the parent, with stacks.
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2 * timeout)
    )


def _ended(name: str, directory: Path, status: int) -> Ended:
    phase = _read(directory, name, "phase")
    trace = _read(directory, name, "trace")
    if refusal := _read(directory, name, "refused"):
        return Ended(phase, refusal, True, trace)
    error = _read(directory, name, "error")
    if status and not error:
        log = _read(directory, name, "log")
        error = (
            f"died of signal {os.WTERMSIG(status)}"
            if os.WIFSIGNALED(status)
            else f"ended with status {status}"
        )
        trace = log[-2000:]
    return Ended(phase, error, False, trace)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _read(directory: Path, name: str, kind: str) -> str:
    path = directory / f"{name}.{kind}"
    return path.read_text() if path.exists() else ""
