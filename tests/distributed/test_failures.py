"""One rank's failure ends all ranks within seconds, and each says in a line which rank it was, where and why."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hfscale.distributed.failures import _Listener

from ..sweeps import cases
from . import failing_runs

RAISES = 'raise ValueError("a bad row\\nof many lines")'
WAYS = {
    RAISES: (1, "failed: ValueError: a bad row, at failing_runs.py:"),
    "os.kill(os.getpid(), 9)": (-9, "ended (signal 9)"),
    "os._exit(3)": (3, "ended (exit code 3)"),
    "sys.exit(4)": (4, "ended"),
}
FAILING: list[dict[str, Any]] = [
    {"how": how, "collective": collective, "failing": failing, "sleeps": 60.0}
    for how in WAYS
    for collective, failing in ((True, 1), (False, 0))
]
# Every way, and both kinds of waiting.
DAILY = (
    FAILING[0],
    FAILING[1],
    FAILING[2],
    FAILING[5],
    FAILING[6],
)
OTHERS: dict[str, dict[str, Any]] = {
    "nothing to train": {
        "how": "explain_errors(); torch.optim.AdamW([])",
        "collective": True,
        "failing": 1,
        "sleeps": 60.0,
    },
    "all": {
        "how": "pass",
        "collective": False,
        "failing": 9,
        "sleeps": -1.0,
    },  # time.sleep raises on every rank
    "well": {"how": "time.sleep(1)", "collective": False, "failing": 2, "sleeps": 0.0},
    "later": {
        "how": "sys.exit(75)",
        "collective": False,
        "failing": 1,
        "sleeps": 1.0,
    },  # preempted: a good end
    "off": {
        "how": RAISES,
        "collective": False,
        "failing": 1,
        "sleeps": 2.0,
        "env": {"HFSCALE_FAILURES": "0"},
    },
    "stopped": {
        "how": "os.kill(os.getpid(), 19)",
        "collective": False,
        "failing": 1,
        "sleeps": 60.0,
        "stopped": True,
    },
}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    items: list[Any] = request.session.items
    chosen = [
        item.callspec.params["run"] for item in items if item.name.startswith("test_all_end[")
    ]
    asked = {**{json.dumps(run): run for run in chosen}, **OTHERS}
    found = subprocess.run(
        [sys.executable, "-m", failing_runs.__name__, str(tmp_path_factory.mktemp("runs"))],
        input=json.dumps(list(asked.values())),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(asked, json.loads(found.stdout), strict=True))


@pytest.mark.parametrize(
    "run", cases(FAILING, daily=DAILY), ids=lambda run: f"{run['how'][:12]}-{run['failing']}"
)
def test_all_end(runs: dict[str, Any], run: dict[str, Any]) -> None:
    found, failing, (code, words) = runs[json.dumps(run)], run["failing"], WAYS[run["how"]]
    assert found["codes"] == [code if rank == failing else 75 for rank in range(3)]
    assert found["seconds"] < 5
    for rank, text in enumerate(found["told"]):
        lines = [line for line in text.splitlines() if "hfscale: " in line]
        assert len(lines) == (rank != failing), text
        assert not lines or f"[rank{rank}]: hfscale: rank {failing} {words}" in lines[0]
        assert ("Traceback" in text) == (rank == failing and run["how"] == RAISES)


def test_what_fails_alike_everywhere_shows_everywhere(runs: dict[str, Any]) -> None:
    assert runs["all"]["codes"] == [1, 1, 1]
    assert all("ValueError" in text for text in runs["all"]["told"])


def test_ranks_that_end_well_end_nobody(runs: dict[str, Any]) -> None:
    assert runs["well"]["codes"] == [0, 0, 0]
    assert not any("hfscale: " in text for text in runs["well"]["told"])


def test_a_rank_that_asks_to_be_started_again_ends_nobody(runs: dict[str, Any]) -> None:
    assert runs["later"]["codes"] == [0, 75, 0]


def test_a_rank_that_trains_nothing_says_what_to_write(runs: dict[str, Any]) -> None:
    assert runs["nothing to train"]["codes"] == [75, 1, 75]
    for text in runs["nothing to train"]["told"]:
        assert 'AdamW([{"params": [...]}], lr=...), which may be empty' in text


def test_a_stopped_rank_is_not_gone(runs: dict[str, Any]) -> None:
    assert runs["stopped"]["ended"] == 0


def test_it_can_be_turned_off(runs: dict[str, Any]) -> None:
    assert runs["off"]["codes"] == [0, 1, 0]
    assert not any("hfscale: " in text for text in runs["off"]["told"])


def test_strangers_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    listener = _Listener()
    listener.start()
    for said in (
        b"GET / HTTP/1.1\n",
        b'{"rank": 1, "token": "guessed"}\n',
        b'{"rank": 1}\n',
        b"\xff\n",
    ):
        with socket.create_connection(listener.place[:2], timeout=5) as stranger:
            stranger.sendall(said)
            time.sleep(0.1)
    assert listener.is_alive()
    assert not listener._ranks
    listener._close()
