"""Run a test in processes of its own, forked from one that has imported everything: one, or the ranks of a layout."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Reports = list[dict[str, Any]]


def run_ranks(test: Callable[[], Reports], ranks: int, seconds: float) -> tuple[list[Reports | None], str]:
    """Call ``test`` on every one of ``ranks``, forked.

    Returns:
        what it returned on each rank (None: it was killed, or ended without a word), and why one returned nothing.
    """
    with tempfile.TemporaryDirectory() as directory:
        # A file in place of a port: nobody else can take it between the look for a free one and its use.
        children = [_fork(test, rank, ranks, Path(directory)) for rank in range(ranks)]
        why = _wait(children, time.monotonic() + seconds)
        found = [_read(Path(directory) / f"{rank}.json") for rank in range(ranks)]
    return found, why


def _fork(test: Callable[[], Reports], rank: int, ranks: int, directory: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        os.environ.update(_environment(rank, ranks, directory))
        written = directory / f"{rank}.part"
        written.write_text(json.dumps(test(), default=str))
        written.rename(directory / f"{rank}.json")
        code = 0
    finally:
        os._exit(code)


def _environment(rank: int, ranks: int, directory: Path) -> dict[str, str]:
    if ranks == 1:
        return {}
    port = 20_000 + int.from_bytes(directory.name.encode()[-4:], "big") % 40_000
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _wait(children: list[int], until: float) -> str:
    """Wait for all; once one has ended otherwise than well, others have a few seconds left."""
    running, why = set(children), ""
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
