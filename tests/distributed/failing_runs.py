"""Run three ranks for each of several failures: a script, whose ranks are forked so that torch is imported once.

    python failing_runs.py DIRECTORY < runs.json

Prints, for each run, the exit codes, what every rank wrote to stderr, and the seconds from the first end to the last.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hfscale.distributed.failures import explain_errors, share_failures  # noqa: F401 - for `how`


def train(rank: int, store: str, run: dict[str, Any]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3)
    share_failures(None)
    if rank == run["failing"]:
        time.sleep(0.3)
        exec(run["how"])
    elif run["collective"]:
        dist.all_reduce(torch.zeros(3))
    time.sleep(run["sleeps"])


def watch(ranks: list[int], stopped: bool) -> dict[str, Any]:
    """Wait for the ranks, without asking how they ended before all did, as launchers do."""
    ended = dict[int, float]()
    begin = time.monotonic()
    while len(ended) < len(ranks) and not (stopped and time.monotonic() > begin + 4):
        for pid in ranks:
            if (
                pid not in ended
                and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            ):
                ended[pid] = time.monotonic()
        time.sleep(0.02)
    for pid in set(ranks) - ended.keys():
        os.kill(pid, 9)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    times = ended.values() or [0.0]
    return {"codes": codes, "ended": len(ended), "seconds": max(times) - min(times)}


def main() -> None:
    directory = Path(sys.argv[1])
    results = []
    for number, run in enumerate(json.load(sys.stdin)):
        ranks = []
        for rank in range(3):
            pid = os.fork()
            if not pid:
                os.environ |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": "3",
                    "LOCAL_WORLD_SIZE": "3",
                    **run.get("env", {}),
                }
                os.dup2(os.open(directory / f"{number}-{rank}", os.O_WRONLY | os.O_CREAT), 2)
                train(rank, str(directory / f"store{number}"), run)
                return
            ranks.append(pid)
        found = watch(ranks, run.get("stopped", False))
        told = [(directory / f"{number}-{rank}").read_text() for rank in range(3)]
        results.append({**found, "told": told})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
