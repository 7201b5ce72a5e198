"""States survive what happens to machines: processes killed, full disks, files that are cut or changed."""

import fcntl
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale import CheckpointError, ConfigError
from hfscale.checkpoint.state_directory import NewState, old_of
from hfscale.distributed.files.complete import MARK, FileSum, mark_complete, read_mark
from hfscale.testing import RankPool

from ..tiny_models import tiny
from .kills import killed_at_each_event

Pools = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def run() -> tuple[Any, torch.optim.Optimizer]:
    model = hfscale.from_config(tiny("llama", num_hidden_layers=1))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def save(
    run: tuple[Any, torch.optim.Optimizer], directory: Path, step: int, **options: Any
) -> None:
    """A state of which every weight is its step."""
    with torch.no_grad():
        for parameter in run[0].parameters():
            parameter.fill_(step)
    hfscale.save_state(run[0], directory, optimizer=run[1], step=step, **options)


def load(run: tuple[Any, torch.optim.Optimizer], source: Path) -> int:
    with torch.no_grad():
        for parameter in run[0].parameters():
            parameter.fill_(-1)
    step = hfscale.load_state(run[0], source, optimizer=run[1]).step
    assert step is not None
    assert all(bool((parameter == step).all()) for parameter in run[0].parameters())
    return step


def in_a_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Run ``work`` in a copy of this process, which may be killed; its number, and where it is told what ``work`` says
    on the descriptor that it is given.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    code = 1
    try:
        os.close(read)
        work(write)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


KILLED: dict[
    str, tuple[dict[str, int], int, list[str]]
] = {  # states that are there, the next step, what is left
    "first": ({}, 1, ["step-1"]),
    "next": ({"step-1": 1}, 2, ["step-1", "step-2"]),
    "replaced": ({"step-2": 1}, 2, ["step-2"]),
    "pruned": ({"step-1": 1, "step-2": 2, "step-3": 3}, 4, ["step-3", "step-4"]),
}


@pytest.mark.daily("first", "replaced")
@pytest.mark.parametrize("case", KILLED)
def test_killed_while_saving(
    run: tuple[Any, torch.optim.Optimizer], tmp_path: Path, case: str
) -> None:
    """At any file event: the state before it is there, or the new one; where there was none, the run begins anew."""
    before, step, left = KILLED[case]
    root = tmp_path / "states"
    found = []
    (tmp_path / "before").mkdir()
    for name, number in before.items():
        save(run, tmp_path / "before" / name, number)

    def prepare() -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "before", root)

    def work() -> None:
        save(run, root / f"step-{step}", step, keep_last=2 if case == "pruned" else None)

    for _ in killed_at_each_event(work, prepare):
        found.append(hfscale.load_state(run[0], root, optimizer=run[1], missing_ok=True).step)
    assert found == sorted(found)
    assert set(found) == {max(before.values(), default=0), step}
    assert sorted(path.name for path in root.iterdir()) == left


def test_a_killed_first_save_is_told(
    run: tuple[Any, torch.optim.Optimizer], tmp_path: Path, caplog: Any
) -> None:
    """In one line, and no state is made of it."""
    save(run, tmp_path / "step-1", 1)
    (tmp_path / "step-1").rename(tmp_path / ".step-1.incomplete")
    save(run, tmp_path / "step-2", 2)
    (tmp_path / "step-2" / MARK).unlink()
    assert hfscale.load_state(run[0], tmp_path, missing_ok=True).step == 0
    assert len(caplog.messages) == 1
    for name in (".step-1.incomplete", "step-2"):
        assert f"{tmp_path / name} cannot be used: the save was interrupted" in caplog.text


def test_the_newest_is_of_the_highest_step(
    run: tuple[Any, torch.optim.Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock said, and of the run that wrote last; other runs' states are never removed."""
    other = hfscale.from_config(tiny("llama", num_hidden_layers=1))
    hfscale.save_state(other, tmp_path / "step-90000", step=90000)
    clock = time.time
    for step in range(1, 6):
        monkeypatch.setattr(time, "time", lambda step=step: clock() + (3600 if step == 2 else 0))
        save(run, tmp_path / f"step-{step}", step, keep_last=2)
    left = ["step-4", "step-5", "step-90000"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert load(run, tmp_path) == 5
    again = hfscale.from_config(tiny("llama", num_hidden_layers=1))  # in the next process
    assert hfscale.load_state(again, tmp_path).step == 5
    hfscale.save_state(again, tmp_path / "step-6", step=6, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5", "step-6", "step-90000"]
    hfscale.load_state(again, tmp_path / "step-5")  # a way back
    hfscale.save_state(again, tmp_path / "step-5b", step=5, keep_last=1)
    assert hfscale.load_state(again, tmp_path).directory == tmp_path / "step-5b"
    assert (tmp_path / "step-6").exists()


def test_states_of_an_earlier_hfscale(
    run: tuple[Any, torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Whose marks have no run, and maybe no step."""
    for step in (1, 2):
        save(run, tmp_path / f"step-{step}", step)
        path = tmp_path / f"step-{step}" / MARK
        path.write_text(
            json.dumps({"written": step, "files": json.loads(path.read_text())["files"]})
        )
    assert load(run, tmp_path) == 2
    save(run, tmp_path / "step-3", 3, keep_last=1)
    assert load(run, tmp_path) == 3
    assert len(list(tmp_path.iterdir())) == 3


WRONG = [
    {"keep_last": 0},
    {"keep_last": -3},
    {"keep_last": 1.5},
    {"keep_every": True},
    {"step": 1.5},
    {"step": -1},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_numbers_that_are_none(
    run: tuple[Any, torch.optim.Optimizer], tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"must be|is invalid"):
        hfscale.save_state(run[0], tmp_path / "states" / "step-1", **wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "/", "."])
def test_directories_that_cannot_be_states(
    run: tuple[Any, torch.optim.Optimizer],
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        (ConfigError, CheckpointError), match=r"the directory to write must|the current directory"
    ):
        save(run, name, 1)  # type: ignore[arg-type]


def test_a_planted_link_a_file_and_a_lock(
    run: tuple[Any, torch.optim.Optimizer], tmp_path: Path
) -> None:
    """None of them is followed, moved away or waited for."""
    victim = tmp_path / "victim"
    states = tmp_path / "states"
    victim.mkdir()
    (victim / "thesis.tex").write_text("years")
    states.mkdir()
    for name in (".step-1.incomplete", ".step-1.old"):
        (states / name).symlink_to(victim)
    (states / "notes").write_text("mine")
    with pytest.raises(
        CheckpointError, match="notes is a file, and a directory is to be written to this path"
    ):
        save(run, states / "notes", 1)
    handle = os.open(states, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    for step in (1, 2):
        save(run, states / "step-1", step)
    os.close(handle)
    assert load(run, states) == 2
    assert (victim / "thesis.tex").read_text() == "years"
    assert sorted(path.name for path in states.iterdir()) == ["notes", "step-1"]


def edit(path: Path, change: Callable[[bytearray], Any]) -> None:
    content = bytearray(path.read_bytes())
    kept = change(content)
    path.write_bytes(content if kept is None else kept)


def flip(content: bytearray) -> None:
    content[len(content) // 2] ^= 16


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (
        lambda d: edit(d / "rank-00000.safetensors", lambda c: c[:-100]),
        r"has [\d,]+ of [\d,]+ bytes",
    ),
    "flipped bit": (
        lambda d: edit(d / "rank-00000.safetensors", flip),
        "rank-00000.safetensors was changed after",
    ),
    "missing": (lambda d: (d / "rank-00000.pt").unlink(), "rank-00000.pt is missing"),
    "index": (lambda d: edit(d / "state.json", flip), "state.json was changed after"),
    "unfinished": (lambda d: (d / MARK).unlink(), "the save was interrupted"),
    "mark": (lambda d: edit(d / MARK, lambda c: c[:20]), f"has a damaged {MARK}"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged(
    run: tuple[Any, torch.optim.Optimizer], tmp_path: Path, damage: str, caplog: Any
) -> None:
    """It is told in words, never used, and the one before it is."""
    change, words = DAMAGE[damage]
    save(run, tmp_path / "step-1", 1)
    save(run, tmp_path / "step-2", 2)
    change(tmp_path / "step-2")
    with pytest.raises(
        CheckpointError, match=rf"step-2 cannot be used.*{words}.*no complete state"
    ):
        load(run, tmp_path / "step-2")
    assert load(run, tmp_path) == 1
    assert load(run, tmp_path / "latest") == 1
    if damage not in ("unfinished", "mark"):  # which are as old as the beginning of time
        assert "step-2 cannot be used" in caplog.text
    save(run, tmp_path / "step-2", 3)
    assert load(run, tmp_path) == 3


def test_nothing_whole(run: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains none"):
        load(run, tmp_path)
    save(run, tmp_path / "step-1", 1)
    (tmp_path / "step-1" / MARK).unlink()
    with pytest.raises(CheckpointError, match="there is no complete state in"):
        load(run, tmp_path)


def test_between_two_renames(run: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    target = tmp_path / "state"
    save(run, target, 1)
    target.rename(old_of(target))
    assert load(run, target) == 1
    shutil.copytree(old_of(target), target)
    (target / MARK).unlink()  # moved, and not marked yet
    assert load(run, target) == 1
    save(run, target, 2)
    assert load(run, target) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_retention(run: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    for step in range(1, 8):
        save(run, tmp_path / f"step-{step}", step, keep_last=2, keep_every=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-6", "step-7"]
    (tmp_path / "step-7" / MARK).unlink()
    save(run, tmp_path / "step-8", 8, keep_last=2)
    assert load(run, tmp_path) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-6", "step-7", "step-8"]


def test_two_jobs(run: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    save(run, tmp_path / "state", 1)
    other = NewState(tmp_path / "state")
    with pytest.raises(CheckpointError, match="another job is writing"):
        save(run, tmp_path / "state", 2)
    other.give_up()
    assert load(run, tmp_path / "state") == 1
    save(run, tmp_path / "state", 3)
    assert load(run, tmp_path) == 3


def test_other_things_are_not_replaced(
    run: tuple[Any, torch.optim.Optimizer], tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(
        CheckpointError, match=r"has other files \(thesis.tex\), which a state would replace"
    ):
        save(run, tmp_path, 1)
    assert (tmp_path / "thesis.tex").read_text() == "years"


def test_code_is_not_run(run: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    """Not even if sizes and checksums are right."""

    class Crafted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    state = tmp_path / "state"
    save(run, state, 1)
    for name, content in (
        ("rank-00000.pt", pickle.dumps(Crafted(), 2)),
        ("rank-00000.pt", zipped(Crafted(), tmp_path)),
    ):
        (state / name).write_bytes(content)
        mark_complete(
            state, {name: FileSum.of_file(state / name) for name in read_mark(state).files}
        )
        with pytest.raises(CheckpointError, match="holds more than plain data, which is not read"):
            load(run, state)
        assert not (tmp_path / "ran").exists()


def zipped(content: Any, directory: Path) -> bytes:
    torch.save(content, directory / "crafted")
    return (directory / "crafted").read_bytes()


def test_names_outside_of_the_directory(
    run: tuple[Any, torch.optim.Optimizer], tmp_path: Path
) -> None:
    save(run, tmp_path / "state", 1)
    mark = json.loads((tmp_path / "state" / MARK).read_text())
    mark["files"]["../../etc/passwd"] = [1, 1]
    (tmp_path / "state" / MARK).write_text(json.dumps(mark))
    with pytest.raises(CheckpointError, match=r"names \.\./\.\./etc/passwd, which is missing"):
        load(run, tmp_path / "state")


def failing(run: tuple[Any, torch.optim.Optimizer], target: Path, before: Callable[[], Any]) -> str:
    """What a save says in a child that is limited by ``before``."""

    def work(told: int) -> None:
        before()
        try:
            save(run, target, 2)
        except CheckpointError as error:
            os.write(told, str(error).encode())

    child, read = in_a_child(work)
    os.waitpid(child, 0)
    text = os.read(read, 1 << 16).decode()
    os.close(read)
    return text


def test_a_full_disk(run: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    """A limit of the size of files stands for it: a write fails in the middle."""
    save(run, tmp_path / "state", 1)
    size = (tmp_path / "state" / "rank-00000.safetensors").stat().st_size
    for limit in (0, 1000, size // 2, size - 1):
        text = failing(
            run,
            tmp_path / "state",
            lambda limit=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
        assert ("could not be written: " in text) != ("the state cannot be taken: " in text), limit
        assert "File too large" in text
        assert load(run, tmp_path / "state") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_full_file_system(run: tuple[Any, torch.optim.Optimizer], tmp_path: Path) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if done.returncode:
        pytest.skip("no file systems can be mounted here")
    try:
        save(run, tmp_path / "step-1", 1)
        size = sum(path.stat().st_size for path in (tmp_path / "step-1").iterdir())
        step = 2
        while shutil.disk_usage(tmp_path).free > 1.2 * size:
            save(run, tmp_path / f"step-{step}", step)
            step += 1
        (tmp_path / "other").write_bytes(
            bytes(max(0, shutil.disk_usage(tmp_path).free - size // 2))
        )
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(run, tmp_path / f"step-{step}", step)
        assert load(run, tmp_path) == step - 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_directory_that_cannot_be_written(
    run: tuple[Any, torch.optim.Optimizer], tmp_path: Path
) -> None:
    save(run, tmp_path / "state", 1)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o755)
    tmp_path.chmod(0o555)

    def nobody() -> None:
        if os.geteuid() == 0:  # who may write everywhere
            os.seteuid(65534)

    assert "Permission denied" in failing(run, tmp_path / "state", nobody)
    tmp_path.chmod(0o755)
    assert load(run, tmp_path / "state") == 1


def two_ranks(directory: str) -> None:
    model = hfscale.from_config(tiny("llama"), parallel=hfscale.ParallelConfig(tp_size=2))
    hfscale.save_state(model, directory)


def lacking(directory: str) -> str:
    model = hfscale.from_config(tiny("llama"), parallel=hfscale.ParallelConfig(tp_size=2))
    with pytest.raises(CheckpointError) as caught:
        hfscale.load_state(model, directory)
    return str(caught.value)


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "rank-00001.pt"])
def test_a_file_of_another_rank_is_missing(pools: Pools, tmp_path: Path, name: str) -> None:
    pool = pools(2)
    directory = tmp_path / "state"
    pool.run(two_ranks, str(directory))
    (directory / name).unlink()
    for message in pool.run(lacking, str(directory)):  # on every rank
        assert f"{name} is missing" in message
