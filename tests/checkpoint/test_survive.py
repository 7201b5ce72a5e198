"""Jobs that lose a process, are told to stop, or fail on one rank: one command brings them back, or ends them."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.checkpoint.state_directory import candidates
from hfscale.testing import RankPool
from hfscale.train import preemption
from hfscale.train.gradient_norm import BadStepError, BadSteps
from hfscale.train.runtime.writing import saving

from ..tiny_models import tiny

SCRIPT = """
import os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
import hfscale
from transformers import LlamaConfig

root, out, fault, axis = sys.argv[1:]
accelerator = hfscale.Accelerator(cpu=True) if fault == "killed" else None
config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=67)
model = hfscale.from_config(config, parallel=hfscale.ParallelConfig(**{axis: 2}))
model.train()
optimizer = hfscale.create_optimizer(model, lr=1e-2)
rank, first = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
start = hfscale.load_state(model, root, optimizer=optimizer, missing_ok=True).step
now = [start]

def strike(*_):
    if now[0] == 4 and first and rank == 1:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "error":
            sys.stderr.write(f"AT {time.time()}\\n")
            raise ValueError("the GPU is on fire")
        if fault == "told":
            os.kill(os.getpid(), signal.SIGTERM)

for name, module in model.named_modules():
    if name.endswith("mlp"):
        module.register_forward_hook(strike)
while now[0] < 7:
    if hfscale.preempted(model):
        hfscale.save_state(model, f"{root}/step-{now[0]}", optimizer=optimizer, step=now[0])
        raise hfscale.Preempted
    ids = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(now[0]))
    loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    optimizer.step()
    optimizer.zero_grad()
    now[0] += 1
    if rank == 0:
        with open(out, "a") as file:
            file.write(f"{now[0]} {loss.item().hex()}\\n")
    if now[0] % 2 == 0:
        hfscale.save_state(model, f"{root}/step-{now[0]}", optimizer=optimizer, step=now[0], keep_last=2)
"""


def launch(
    tmp_path: Path, fault: str, *options: str, axis: str = "tp_size"
) -> tuple[int, str, list[list[str]]]:
    """Exit code, what it said, and the steps that were done with their losses."""
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / f"losses-{fault}"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "PYTHONWARNINGS": "ignore"}
    arguments = ["script.py", str(tmp_path / f"states-{fault}"), str(out), fault, axis]
    with socket.socket() as free:
        free.bind(("", 0))
        options = (*options, "--main_process_port", str(free.getsockname()[1]))
    command = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", *options]
    done = subprocess.run(
        [sys.executable, "-m", *command, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stderr, [line.split() for line in out.read_text().splitlines()]


def uninterrupted() -> list[list[str]]:
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 67,
    }
    config = LlamaConfig(hidden_size=32, intermediate_size=48, **sizes)
    model = hfscale.from_config(config, parallel=ParallelConfig(tp_size=2)).train()
    optimizer = hfscale.create_optimizer(model, lr=1e-2)
    done = []
    for step in range(7):
        ids = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(step))
        done.append(
            [
                str(step + 1),
                hfscale.train_step(model, {"input_ids": ids, "labels": ids}).item().hex(),
            ]
        )
        optimizer.step()
        optimizer.zero_grad()
    return done


@pytest.mark.slow
def test_a_killed_rank_brings_the_job_back(
    pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """By itself, with the losses of a run in which nothing happened, bit by bit."""
    code, said, done = launch(tmp_path, "killed", "--max_restarts", "1")
    assert code == 0, said
    assert "[rank0]: Traceback" not in said  # but one line, of rank 1
    assert done == pools(2).run(uninterrupted)[0]  # killed in the fifth step, behind the save at 4


def told_on_one_rank() -> list[bool]:
    """Whether the end is announced before and after a signal to the second rank."""
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=1), parallel=ParallelConfig(tp_size=2)
    )
    try:
        before = hfscale.preempted(model)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return [before, hfscale.preempted(model)]
    finally:
        preemption.stop_listening()


def test_every_rank_hears_of_a_signal_to_one(pools: Callable[[int], RankPool]) -> None:
    assert pools(2).run(told_on_one_rank) == [[False, True], [False, True]]


@pytest.mark.slow
def test_told_to_stop(tmp_path: Path) -> None:
    """One rank is told, in the middle of a step; both save behind it, where the next start goes on."""
    code, said, done = launch(tmp_path, "told")
    assert "exitcode  : 75" in said
    assert code != 0
    assert [int(step) for step, _ in done] == [1, 2, 3, 4, 5]
    assert candidates(tmp_path / "states-told")[0].name == "step-5"


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["pp_size", "tp_size"])
def test_an_error_on_one_rank_ends_all(tmp_path: Path, axis: str) -> None:
    """With that error on screen, through stages as well."""
    code, said, _ = launch(tmp_path, "error", axis=axis)
    ended = time.time()
    assert code == 1
    assert "[rank1]: ValueError: the GPU is on fire" in said
    began = float(said.partition("AT ")[2].split()[0])
    # And not ten minutes, gloo's limit; it takes 3 s where nothing else runs.
    assert ended - began < 60


def test_bad_steps() -> None:
    bad = BadSteps(limit=3)
    good = torch.tensor(1.0)
    assert bad.may_step(good, good)
    assert not bad.may_step(torch.tensor(math.nan), good)
    assert not bad.may_step(good, torch.tensor(math.inf))
    assert bad.may_step(good, good)
    assert (bad.skipped, bad.in_a_row) == (2, 0)
    resumed = BadSteps(limit=2)
    assert not bad.may_step(good, -math.inf)
    resumed.load_state_dict(bad.state_dict())
    with pytest.raises(BadStepError, match=r"2 steps in a row.*norm nan"):
        resumed.may_step(good, math.nan)


def test_a_save_is_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience counts from its end."""
    ended: list[float] = []
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(time.monotonic()))
    listener = preemption._Listener(patience=0.05)
    try:
        with saving():
            os.kill(os.getpid(), signal.SIGTERM)
            listener._thread.join(0.3)
            assert listener._thread.is_alive()
            saved = time.monotonic()
        listener._thread.join()
    finally:
        listener.close()
    assert ended[0] >= saved


@pytest.mark.parametrize("answered", [True, False])
def test_who_has_heard_of_the_end_may_take_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answered: bool
) -> None:
    """Also where the thread that watches comes to look after the loop has asked, and saves."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    listener = preemption._Listener(patience=0.01)
    monkeypatch.setattr(preemption, "_listener", [listener])
    try:
        if answered:
            listener.told = True
            assert hfscale.preempted(
                hfscale.from_config(tiny("llama", num_hidden_layers=1)), patience=0.01
            )
        os.kill(os.getpid(), signal.SIGTERM)
        listener._thread.join()
    finally:
        listener.close()
    assert ended == ([] if answered else [75])
    assert (
        "SIGTERM came 0 s ago, and the step has not ended" in capsys.readouterr().err
    ) != answered
