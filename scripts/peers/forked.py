"""Run a test in processes of its own, forked from one that has imported everything: one, or the ranks of a layout."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hfscale.distributed.processes import renew_thread_pool

Reports = list[dict[str, Any]]


def run_ranks(
    test: Callable[[], Reports], ranks: int, seconds: float, directory: Path
) -> tuple[list[Reports | None], str]:
    """Call ``test`` on every one of ``ranks``, forked; they write what they have to say into ``directory``.

    Returns:
        what it returned on each rank (None: it was killed, or ended without a word), and why one returned nothing.
    """
    environment = _environment(ranks)
    files = [directory / f"{rank}.json" for rank in range(ranks)]
    children = [_fork(test, rank, environment, files) for rank in range(ranks)]
    why = _wait(children, time.monotonic() + seconds)
    return [_read(file) for file in files], why


def _fork(
    test: Callable[[], Reports], rank: int, environment: dict[str, str], files: list[Path]
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        renew_thread_pool()
        if environment:
            os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        reports = test()
        written = files[rank].with_suffix(".part")
        written.write_text(json.dumps(reports, default=str))
        written.rename(files[rank])
        code = 0
        # A rank that is gone ends the others, so one that is done stays for them, and one that failed does not.
        passed = all(report["outcome"] != "failed" for report in reports)
        while passed and not all(file.exists() for file in files):
            time.sleep(0.02)
    finally:
        os._exit(code)


def _environment(ranks: int) -> dict[str, str]:
    """Return what a launcher of several ranks says to all of them."""
    if ranks == 1:
        return {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = str(ranks)
    return {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _wait(children: list[int], until: float) -> str:
    """Wait for all; once one has ended otherwise than well, others have a few seconds left."""
    running = set(children)
    why = ""
    while running:
        for child in sorted(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            running.discard(child)
            if status and not why:
                why = f"a process ended with {os.waitstatus_to_exitcode(status)}"
        if running and time.monotonic() > until:
            why = why or "it took too long"
            for child in running:
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
    return why


def _read(path: Path) -> Reports | None:
    return json.loads(path.read_text()) if path.exists() else None
