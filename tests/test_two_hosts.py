"""Two hosts, as network namespaces with a cable between them: ``accelerate launch --num_machines 2`` on each."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .test_launch import _OF_LAUNCHERS, SCRIPT

_PORT = 29500  # of a host that nothing else runs on


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces, ``10.77.0.1`` and ``10.77.0.2``."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.fail("two hosts need root and iproute2: run the other tests with -m 'not slow'")
    names = [f"hfs{os.getpid()}{end}" for end in "ab"]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip(
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
        for index, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", "cable")
            for link in ("lo", "cable"):
                _ip("-n", name, "link", "set", link, "up")
        yield names


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.mark.slow
def test_two_hosts_train_one_model(hosts: list[str], tmp_path: Path) -> None:
    """Each starts one of the two ranks, which find each other over the cable; both see one loss."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key not in _OF_LAUNCHERS}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"GLOO_SOCKET_IFNAME": "cable", "PYTHONPATH": str(Path(__file__).parents[1])}
    meet = ["--main_process_ip", "10.77.0.1", "--main_process_port", str(_PORT)]
    started = []
    for rank, host in enumerate(hosts):
        line = [
            "--multi_gpu",
            "--num_processes",
            "2",
            "--num_machines",
            "2",
            "--machine_rank",
            str(rank),
            *meet,
        ]
        command = [sys.executable, "-m", "accelerate.commands.launch", *line, str(script)]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=250)[0] for process in started]
    lines = [line for text in said for line in text.splitlines() if line.startswith("RANK")]
    assert [line.split(" LOSS ")[0] for line in lines] == [
        "RANK 0 OF 2 MAIN True",
        "RANK 1 OF 2 MAIN False",
    ], said
    assert len({line.split(" LOSS ")[1] for line in lines}) == 1
