"""A machine is lost for good: the job goes on with those that are left, in the first layout that fits them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import hfscale
from hfscale import ParallelConfig

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
}
LAST = 8
SCRIPT = f"""
import os, sys, time
import torch
torch.set_num_threads(1)
import hfscale
from transformers import LlamaConfig

root, out, struck = sys.argv[1:]
layout = hfscale.fitting_layout([hfscale.ParallelConfig(tp_size=2), hfscale.ParallelConfig()])
config = LlamaConfig(hidden_size=32, intermediate_size=48, **{SIZES})
model = hfscale.from_config(config, parallel=layout, dtype=torch.float64).train()
optimizer = hfscale.create_optimizer(model, lr=1e-2)
hfscale.watchdog(model, patience=3, end=True)
for step in range(hfscale.load_state(model, root, optimizer=optimizer, missing_ok=True).step, {LAST}):
    ids = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(step))
    loss = hfscale.train_step(model, {{"input_ids": ids, "labels": ids}})
    optimizer.step()
    optimizer.zero_grad()
    if os.environ["RANK"] == "0":
        with open(out, "a") as file:
            file.write(f"{{step + 1}} {{loss.item()}} {{layout.tp_size}}\\n")
    if (step + 1) % 2 == 0:
        hfscale.save_state(model, f"{{root}}/step-{{step + 1}}", optimizer=optimizer, step=step + 1)
    while step + 1 == 5 and os.environ["RANK"] == "1":  # the other one goes on into the next step, and waits
        open(struck, "w").close()
        time.sleep(1)
"""


def uninterrupted() -> list[float]:
    config = LlamaConfig(hidden_size=32, intermediate_size=48, **SIZES)
    model: Any = hfscale.from_config(config, parallel=ParallelConfig(), dtype=torch.float64).train()
    optimizer = hfscale.create_optimizer(model, lr=1e-2)
    losses = []
    for step in range(LAST):
        ids = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(step))
        losses.append(float(hfscale.train_step(model, {"input_ids": ids, "labels": ids})))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_networks() -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces joined by a cable; yields what runs a command in each."""
    names = [f"hfscale-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            names[1],
        )
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def networks_allowed() -> bool:
    """Whether this process may make networks, as root in a machine of its own may."""
    try:
        with two_networks():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def agent(
    tmp_path: Path, within: list[str], number: int, address: str, port: int, nodes: str = "1:2"
) -> subprocess.Popen[bytes]:
    """The launcher on one of two hosts."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "MEMORY": str(tmp_path / f"memory-{number}"),
    }
    if within:
        environment["GLOO_SOCKET_IFNAME"] = "cable"
    rendezvous = f"is_host={1 - number},last_call_timeout=3,join_timeout=120"
    options = [
        "--nnodes",
        nodes,
        "--nproc_per_node",
        "1",
        "--max_restarts",
        "3",
        "--rdzv_backend",
        "c10d",
    ]
    options += [
        "--rdzv_id",
        "job",
        "--rdzv_endpoint",
        f"{address}:{port}",
        "--rdzv_conf",
        rendezvous,
    ]
    options += ["--local_addr", f"10.77.0.{number + 1}" if within else address]
    arguments = [str(tmp_path / name) for name in ("script.py", "states", "losses", "struck")]
    with (tmp_path / f"said-{number}").open("ab") as said:
        return subprocess.Popen(
            [*within, sys.executable, "-m", "torch.distributed.run", *options, *arguments],
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and the ranks, which have sessions of their own."""
    found = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {int(pid): int(parent) for pid, parent in map(str.split, found.splitlines())}
    family = {process.pid}
    for _ in range(4):
        family |= {pid for pid, parent in parents.items() if parent in family}
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    process.wait()


def lose_one(
    tmp_path: Path,
    hosts: list[list[str]],
    address: str,
    port: int,
    lose: Callable[[subprocess.Popen[bytes]], None],
) -> str:
    """Start two hosts, lose the second in the sixth step; what the first one said."""
    (tmp_path / "script.py").write_text(SCRIPT)
    agents = [agent(tmp_path, within, number, address, port) for number, within in enumerate(hosts)]
    try:
        limit = time.time() + 200
        while not (tmp_path / "struck").exists():
            assert time.time() < limit, (tmp_path / "said-0").read_text()
            time.sleep(0.2)
        lose(agents[1])
        assert agents[0].wait(300) == 0, (tmp_path / "said-0").read_text()
    finally:
        for process in agents:
            if process.poll() is None:
                end(process)
    return (tmp_path / "said-0").read_text()


def check(tmp_path: Path, said: str) -> None:
    done = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    assert [(int(step), int(size)) for step, _, size in done] == [
        *((step, 2) for step in range(1, 6)),
        *((step, 1) for step in range(5, LAST + 1)),
    ], said
    expected = uninterrupted()
    for step, loss, _ in done:
        assert float(loss) == pytest.approx(expected[int(step) - 1], rel=1e-12, abs=0)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_host_is_killed(tmp_path: Path) -> None:
    check(tmp_path, lose_one(tmp_path, [[], []], "127.0.0.1", free_port(), end))


COMES_BACK = (
    SCRIPT.partition("hfscale.watchdog")[0]
    + """
world, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
memory = hfscale.StatesInMemory(model, root, every=2, optimizer=optimizer, memory=os.environ["MEMORY"])
for step in range(memory.load().step, 8):
    ids = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(step))
    loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    optimizer.step()
    optimizer.zero_grad()
    if rank == "0":
        with open(out, "a") as file:
            file.write(f"{step + 1} {loss.item()} {layout.tp_size}\\n")
    memory.save(step + 1)
    if step + 1 == 5 and rank == "1" and not os.path.exists(struck):
        open(struck, "w").close()
        time.sleep(1000)
    while step + 1 == 6 and world == "1":  # until the other host is back
        time.sleep(0.1)
memory.remove()
"""
)


@pytest.mark.parametrize("nodes", ["1:2", "2"])
def test_a_host_comes_back(tmp_path: Path, nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed with its memory; the other one goes on alone from what it keeps of both, or waits for it."""
    # Or torch 2.13 does not tell it where that is.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    (tmp_path / "script.py").write_text(COMES_BACK)
    for number in range(2):
        (tmp_path / f"memory-{number}").mkdir()
    port = free_port()
    losses = tmp_path / "losses"
    agents = [agent(tmp_path, [], number, "127.0.0.1", port, nodes) for number in range(2)]
    alone = [(5, 1), (6, 1)] if nodes == "1:2" else []

    def wait_until(come: Callable[[], bool]) -> None:
        limit = time.time() + 250
        while not come():
            assert time.time() < limit, (tmp_path / "said-0").read_text()
            time.sleep(0.2)

    try:
        wait_until((tmp_path / "struck").exists)
        end(agents[1])
        shutil.rmtree(tmp_path / "memory-1")
        (tmp_path / "memory-1").mkdir()
        wait_until(lambda: not alone or losses.read_text().splitlines()[-1].endswith(" 1"))
        agents[1] = agent(tmp_path, [], 1, "127.0.0.1", port, nodes)
        assert [each.wait(250) for each in agents] == [0, 0], (tmp_path / "said-0").read_text()
    finally:
        for process in agents:
            if process.poll() is None:
                end(process)
    done = [line.split() for line in losses.read_text().splitlines()]
    again = [(step, 2) for step in range(7 if alone else 5, 9)]
    assert [(int(step), int(size)) for step, _, size in done] == [
        *((step, 2) for step in range(1, 6)),
        *alone,
        *again,
    ]
    expected = uninterrupted()
    for step, loss, _ in done:
        assert float(loss) == pytest.approx(expected[int(step) - 1], rel=1e-12, abs=0)
    assert not [*tmp_path.glob("memory-*/*")]


@pytest.mark.skipif(not networks_allowed(), reason="network namespaces need privileges")
def test_the_network_of_a_host_is_torn_down(tmp_path: Path) -> None:
    """Nobody is told: the other one finds out by waiting."""
    with two_networks() as hosts:
        unplug = partial(ip, "-n", hosts[1][-1], "link", "set", "cable", "down")
        said = lose_one(tmp_path, [*hosts], "10.77.0.1", 29677, lambda _: unplug())
    check(tmp_path, said)
    assert "rank 1: gives no sign of life" in said
