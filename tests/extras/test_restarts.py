"""Ranks start again without imports: in processes that those of the launcher fork."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import hfscale
from hfscale.distributed.processes import store_of_ranks
from hfscale.extras.states_in_memory import restarts
from hfscale.extras.states_in_memory.restarts import _wait
from hfscale.testing import RankPool


def fork(code: int) -> int:
    child = os.fork()
    if child == 0:
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    return child


@pytest.mark.parametrize(
    ("code", "again"), [(0, False), (1, True), (75, True), (2, False), (-signal.SIGKILL, True)]
)
def test_which_ends_start_again(code: int, again: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert _wait(fork(code), dist.HashStore(), 1) == (code, again)
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_rank_decides() -> None:
    """The other rank broke: what this one says of it is no refusal; and it ends well, but the other does not."""
    for code in (2, 0):
        store = dist.HashStore()
        for what in ("broken", "failed", "ended"):
            store.add(what, 1)
        assert _wait(fork(code), store, 2) == (code, True)


def test_another_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_GRACE", 0.1)
    store = dist.HashStore()
    for what in ("refused", "failed", "ended"):
        store.add(what, 1)
    child = os.fork()
    if child == 0:
        signal.pause()
    assert _wait(child, store, 2) == (-signal.SIGKILL, False)


def test_told_behind_the_end_of_its_child() -> None:
    """The other rank has not ended yet when the launcher ends both: neither forks again."""
    store = Mock()
    counts = Counter[str]()

    def add(what: str, more: int) -> int:
        counts[what] += more
        if what == "ended" and not more:  # its parent waits for the other one
            signal.raise_signal(signal.SIGTERM)
        return counts[what]

    store.add = add
    assert _wait(fork(1), store, 2) == (1, False)
    assert counts["final"] == 1


def meet(port: int, said: str) -> tuple[bool, bytes]:
    os.environ["MASTER_PORT"] = str(port)
    store: Any = store_of_ranks("here")
    found = store.check(["said"])
    dist.barrier()
    if dist.get_rank() == 0:
        store.set("said", said)
    return found, store.get("said")


def test_ranks_meet_apart_from_those_before(pools: Callable[[int], RankPool]) -> None:
    whole = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    whole.add("here/come-1", 3)  # and heard nothing
    for said in ("first", "second"):
        assert pools(2).run(meet, whole.port, said) == [(False, said.encode())] * 2


def test_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hfscale.ConfigError, match="restarts"):
        hfscale.restart_in_place(-1)
    if threading.active_count() == 1:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(hfscale.ConfigError, match="torchrun or accelerate launch"):
            hfscale.restart_in_place()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with pytest.raises(
            hfscale.ConfigError, match="before CUDA, other threads or process groups"
        ):
            hfscale.restart_in_place()
    finally:
        ended.set()
        thread.join()


def test_a_forked_process_has_a_thread_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before autograd's threads, one per device, ask for it all at once."""
    set_threads = Mock()
    monkeypatch.setattr(torch, "set_num_threads", set_threads)
    monkeypatch.setattr(restarts.os, "fork", lambda: 0)
    monkeypatch.setattr(restarts.ctypes, "CDLL", Mock())
    monkeypatch.setattr(restarts.threading, "active_count", lambda: 1)
    monkeypatch.setattr(restarts.dist, "is_initialized", lambda: False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    hfscale.restart_in_place()
    set_threads.assert_called_once_with(torch.get_num_threads())


SCRIPT = """
import os, signal, sys
import hfscale
from transformers import LlamaConfig

print("IMPORTED", flush=True)
hfscale.restart_in_place(3)
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=17)
model = hfscale.from_config(config, parallel=hfscale.ParallelConfig(tp_size=2))
with open(sys.argv[1], "a") as told:
    told.write(f"{os.getppid()} {os.getpid()}\\n")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
import torch
torch.distributed.barrier()
print("DONE", flush=True)
"""


@pytest.mark.slow
def test_a_killed_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    line = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py", "told"]
    run = subprocess.run(
        [sys.executable, "-m", *line],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    assert (run.stdout.count("IMPORTED"), run.stdout.count("DONE")) == (2, 2)
    assert "rank 1 ended (" in run.stderr
    told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert (len({parent for parent, _ in told}), len({child for _, child in told})) == (2, 4)
