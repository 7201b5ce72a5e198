"""Saves behind the steps: what was at the call is written, errors are told, and the end waits."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale import CheckpointError
from hfscale.checkpoint import state_save
from hfscale.testing import RankPool

from .test_state import start, train, weights

Pools = Callable[[int], RankPool]


@contextmanager
def held_disk() -> Iterator[threading.Event]:
    """Within: nothing is agreed upon, or written, until the event is set."""
    agreed, free = state_save.agreed_index, threading.Event()

    def agree(taken: Any) -> Any:
        assert free.wait(60)
        return agreed(taken)

    state_save.agreed_index = agree
    try:
        yield free
    finally:
        free.set()
        hfscale.wait_for_saves()
        state_save.agreed_index = agreed


def behind(layout: dict[str, Any], directory: str) -> None:
    run = start(layout, 0)
    train(run, range(2))
    mark = Path(directory) / "complete.json"
    with held_disk() as free:
        hfscale.save_state(
            run[0], directory, optimizer=run[1], scheduler=run[2], step=2, asynchronous=True
        )
        # weights and states change meanwhile
        expected = train(run, range(2, 4))
        end = weights(run[0])
        assert not mark.exists()
        free.set()
        hfscale.save_state(run[0], f"{directory}-next", asynchronous=True)  # waits for the first
        assert mark.exists()
    resumed = start(layout, 1)
    assert (
        hfscale.load_state(resumed[0], directory, optimizer=resumed[1], scheduler=resumed[2]).step
        == 2
    )
    assert train(resumed, range(2, 4)) == expected
    assert all(torch.equal(weight, end[name]) for name, weight in weights(resumed[0]).items())


@pytest.mark.parametrize(
    "layout", [{"tp_size": 2}, {"dp_shard_size": 2}, {}], ids=["tp2", "shard2", "one"]
)
def test_what_was_is_written(pools: Pools, tmp_path: Path, layout: dict[str, Any]) -> None:
    arguments = (layout, str(tmp_path / "state"))
    if layout:
        pools(2).run(behind, *arguments)
    else:
        behind(*arguments)


def failing(directory: str) -> list[str]:
    run = start({"tp_size": 2}, 0)
    messages = []
    for wait in (hfscale.wait_for_saves, lambda: hfscale.save_state(run[0], f"{directory}/good")):
        hfscale.save_state(run[0], f"{directory}/file/state", asynchronous=True)
        with pytest.raises(CheckpointError) as caught:
            wait()
        messages.append(str(caught.value))
    hfscale.save_state(run[0], f"{directory}/good", asynchronous=True)
    hfscale.wait_for_saves()
    return messages


def test_errors_are_told_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for messages in pools(2).run(failing, str(tmp_path)):
        for message in messages:
            assert "asynchronous save of" in message
            assert "rank 0: [Errno 17] File exists" in message
    assert (tmp_path / "good" / "complete.json").exists()


SCRIPT = """
import sys, time, torch, hfscale
from hfscale.checkpoint import state_save
from transformers import LlamaConfig
written = state_save.write_tensors
state_save.write_tensors = lambda *arguments: (time.sleep(1), written(*arguments))[1]
model = hfscale.from_config(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=67))
hfscale.save_state(model, sys.argv[1], asynchronous=True)
print("the end")
"""


@pytest.mark.slow
def test_exit_waits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "state")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
    assert (tmp_path / "state" / "complete.json").exists()
