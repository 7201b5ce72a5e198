"""Run functions on a pool of rank processes that stays alive between tests.

Importing torch and transformers takes seconds per process. So one server process imports them once, and all ranks are
forked from the server. The ranks of each world size start once, and then receive functions to run. Ranks rendezvous
through a file, not a port. If a rank fails or a call times out, the pool reports the error of each failed rank and the
stack of each other rank, ends them, and starts new ranks at the next call.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_GRACE_SECONDS = 3.0
# Modules that are slow to import; hfscale itself is imported by the ranks, which have its path.
PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.auto",
    "accelerate",
)


class RankError(AssertionError):
    """Raised if a function raised an exception on some rank of a pool, or did not return in time."""


class RankPool(AbstractContextManager["RankPool"]):
    """Run functions on ``world`` processes that form one process group.

    Args:
        world: number of ranks.
        timeout: seconds that one call of :meth:`run` may take.
        threads: torch threads per rank.
        preload: names of modules that are imported once, before ranks are forked.
        backend: a function that registers a communication backend on each rank and returns its name; gloo by default.
        as_large: whether ranks overlap communication and computation for tensors of any size, so that the small tensors
            of tests take the code paths of large ones.
    """

    def __init__(
        self, world: int, timeout: float = 120.0, threads: int = 1, preload: Sequence[str] = PRELOADED,
        backend: Callable[[], str] | None = None, as_large: bool = True,
    ) -> None:  # fmt: skip
        self.world = world
        self.timeout = timeout
        self.threads = threads
        self.as_large = as_large
        self._preload = list(preload)
        self.backend = backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank; return the results by rank.

        ``function`` is pickled by reference, so define it at the top level of an importable module. Raise
        :class:`RankError` if it raises on a rank, or if a rank does not return within the timeout.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, args, kwargs))
        except OSError as error:  # a rank died after its last answer
            self.close()
            raise RankError(
                f"the process of a rank has ended, so the call could not be sent to it: {error}"
            ) from error
        return self._collect()

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` once, in the calling process and not on the ranks."""
        return function(*args)

    def close(self) -> None:
        """End the rank processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._directory is not None:
            self._directory.cleanup()
        self._processes = []
        self._pipes = []
        self._directory = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        from .._compat.torch_device import accelerators

        # Forking this process would copy locks that its threads hold. A GPU's driver, which imports in the server
        # start, does not survive a fork. Windows cannot fork at all.
        forks = (
            "forkserver" in multiprocessing.get_all_start_methods()
            and not accelerators().is_available()
        )
        method = "forkserver" if forks else "spawn"
        context: Any = multiprocessing.get_context(method)
        if forks:
            context.set_forkserver_preload(self._preload)
        self._directory = tempfile.TemporaryDirectory(prefix="hfscale-ranks-")
        take_over = partial(
            _take_over, list(sys.path), dict(os.environ), os.getcwd(), self.as_large
        )
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    rank,
                    self.world,
                    self._directory.name,
                    theirs,
                    take_over,
                    self.threads,
                    self.timeout,
                )
                + (self.backend,),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + self.timeout
        waiting = dict(zip(self._pipes, range(self.world), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                pipe: Connection = ready  # type: ignore[assignment]
                rank = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok = False
                    value = "the process died"
                (results if ok else errors)[rank] = value
                if not ok:  # other ranks may wait for this rank forever
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if errors or waiting:
            raise self._failure(errors, sorted(waiting.values()))
        return [results[rank] for rank in range(self.world)]

    def _failure(self, errors: dict[int, str], waiting: list[int]) -> RankError:
        lines = [f"rank {rank} failed:\n{text}" for rank, text in sorted(errors.items())]
        if waiting:
            assert self._directory is not None
            # A rank that is still starting has no stack file yet, and the signal would kill it.
            stacks = {rank: Path(self._directory.name) / f"stack-{rank}" for rank in waiting}
            for rank, stack in stacks.items():
                if stack.exists():
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)
            for rank, stack in stacks.items():
                place = stack.read_text() if stack.exists() else "its start"
                lines.append(f"rank {rank} did not return; it stands at:\n{place}")
        self.close()
        return RankError("\n".join(lines))


def _take_over(
    path: list[str], environment: dict[str, str], directory: str, as_large: bool
) -> None:
    """Give a newly forked rank the import path, environment and working directory of the process that uses the pool;
    the fork has those of the server, which started earlier.
    """
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    if as_large:
        from ..distributed.ops import overlap

        overlap.OVERLAPPED_FROM = 0


def _serve(
    rank: int,
    world: int,
    directory: str,
    pipe: Connection,
    take_over: Callable[[], None],
    threads: int,
    timeout: float,
    backend: Callable[[], str] | None,
) -> None:
    take_over()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    # Accelerate requires an address even if the process group exists already; nothing listens at this address.
    os.environ.update(
        ACCELERATE_USE_CPU="1", MASTER_ADDR="localhost", MASTER_PORT="29500", HFSCALE_FAILURES="0"
    )
    with open(Path(directory) / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        import torch
        import torch.distributed as dist
        from tqdm import tqdm
        from transformers.utils import logging

        from .._compat.torch_gloo import share_gloo_thread

        # Otherwise each progress bar would hold a lock shared by all processes, which a stopped rank would never
        # release.
        tqdm.set_lock(threading.RLock())
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        warnings.simplefilter("ignore")
        share_gloo_thread()
        store = torch.distributed.FileStore(str(Path(directory) / "store"), world)  # type: ignore[attr-defined]
        # Longer than the pool's own timeout, so that the pool reports a hang, with stacks.
        patience = timedelta(seconds=2 * timeout)
        try:
            name = "gloo" if backend is None else backend()
            dist.init_process_group(
                name, store=store, rank=rank, world_size=world, timeout=patience
            )
        except Exception:
            pipe.send((False, traceback.format_exc()))
            return
        gc.freeze()  # exclude imported modules from garbage collection
        # Tests build and drop models all the time; with the default threshold, collection takes a tenth of their time.
        gc.set_threshold(20_000)
        # Otherwise the workers of data loaders would import everything again.
        multiprocessing.set_start_method(None, force=True)
        multiprocessing.current_process().daemon = False  # daemons may not have children
        while True:
            try:
                function, args, kwargs = pipe.recv()
            except EOFError:
                return
            try:
                answer = (True, function(*args, **kwargs))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(answer)
