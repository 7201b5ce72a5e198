"""A directory is written on all ranks or on none, and what it held stays until all is whole."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfscale import CheckpointError, ConfigError, ParallelConfig
from hfscale.distributed.files import replace
from hfscale.distributed.process_groups import build_mesh
from hfscale.testing import RankPool
from hfscale.train.runtime.writing import atomic_directory

Pools = Callable[[int], RankPool]


def contents(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def target(tmp_path: Path) -> Path:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("weights-1", "index", "users"):
        (target / name).write_text("old")
    return target


OLD = {"weights-1": "old", "index": "old", "users": "old"}


@pytest.fixture(params=["exchanged", "moved"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the file system lets directories trade names."""
    if request.param == "moved":
        monkeypatch.setattr(replace, "_trade_names", no_space)
    return str(request.param)


def crash(target: Path) -> None:
    with atomic_directory(target, stale=("weights-*",)) as staging:
        (staging.path / "weights").write_text("half")
        raise KeyboardInterrupt


def test_a_crash_in_the_middle_leaves_the_target_as_it_was(target: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        crash(target)
    assert contents(target.parent) == {f"target/{name}": text for name, text in OLD.items()}


def test_what_a_killed_process_left_is_removed(target: Path, mode: str) -> None:
    for left in (
        target / ".incomplete",
        target.with_name(".target.incomplete"),
        target.with_name(".target.0123abcd.discarded"),
    ):
        left.mkdir()
        (left / "weights").write_text("half")
    with atomic_directory(target) as staging:
        assert not contents(staging.path)
        (staging.path / "weights").write_text("whole")
    assert contents(target.parent) == {
        f"target/{name}": text for name, text in {**OLD, "weights": "whole"}.items()
    }


def test_files_replace_those_of_their_name_and_stale_ones(target: Path, mode: str) -> None:
    if os.geteuid() == 0:
        os.chown(target, -1, 12)
    target.chmod(0o2750)
    (target / "runs").mkdir(mode=0o700)
    (target / "runs" / "log").write_text("one")
    inode = target.stat().st_ino
    with (
        (target / "runs" / "log").open("a") as log,
        atomic_directory(target, stale=("weights-*",)) as staging,
    ):
        for name in ("weights", "index", "more"):
            (staging.path / name).write_text("new")
        assert contents(target).items() >= OLD.items()
        log.write(" two")
    assert contents(target) == {
        "weights": "new",
        "index": "new",
        "more": "new",
        "users": "old",
        "runs/log": "one two",
    }
    assert (target.stat().st_mode & 0o7777, (target / "runs").stat().st_mode & 0o777) == (
        0o2750,
        0o700,
    )
    assert (target / "index").stat().st_gid == target.stat().st_gid
    assert (target.stat().st_ino == inode) == (mode == "moved")
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_what_others_write_meanwhile_is_kept(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment at which their files are linked and the exchange, and until the old directory is gone."""
    trade = replace._trade_names
    (target / "runs").mkdir()

    def write_and_trade(one: Path, other: Path) -> None:
        for name in ("runs/log", "fresh", "more/deep"):
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_text("late")
        (target / "users.tmp").write_text("late")
        (target / "users.tmp").replace(target / "users")
        trade(one, other)

    monkeypatch.setattr(replace, "_trade_names", write_and_trade)
    with atomic_directory(target, stale=("weights-*",)) as staging:
        (staging.path / "index").write_text("new")
    late = dict.fromkeys(("runs/log", "fresh", "more/deep", "users"), "late")
    assert contents(target) == {"index": "new", **late}


def test_a_link_to_the_directory_and_the_current_directory(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link stays one, and a process keeps the directory that it is in."""
    link = target.with_name("link")
    link.symlink_to(target)
    monkeypatch.chdir(target)
    for number, name in enumerate((link, ".", target)):
        with atomic_directory(name) as staging:
            (staging.path / "index").write_text(str(number))
        assert Path("index").read_text() == (link / "index").read_text() == str(number)
    assert link.is_symlink()
    assert sorted(path.name for path in target.parent.iterdir()) == ["link", "target"]


@pytest.mark.parametrize("name", [".target.incomplete", ".target.0123abcd.discarded"])
def test_planted_links_are_not_followed(target: Path, name: str) -> None:
    victim = target.with_name("victim")
    victim.mkdir()
    (victim / "thesis").write_text("years")
    target.with_name(name).symlink_to(victim)
    with atomic_directory(target) as staging:
        (staging.path / "index").write_text("new")
    assert contents(victim) == {"thesis": "years"}
    assert contents(target)["index"] == "new"


@pytest.mark.parametrize(
    ("name", "error"), [("", ConfigError), ("/", ConfigError), (None, ConfigError)]
)
def test_a_path_that_cannot_be_a_directory(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="the directory to write must"), atomic_directory(name):
        pass


def test_a_file_is_not_replaced(target: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="users is a file, and a directory"),
        atomic_directory(target / "users"),
    ):
        pass
    assert contents(target) == OLD


def test_two_jobs(target: Path) -> None:
    with atomic_directory(target) as first:
        (first.path / "index").write_text("new")
        with (
            pytest.raises(CheckpointError, match="another job is writing"),
            atomic_directory(target),
        ):
            pass
    assert contents(target) == {**OLD, "index": "new"}


def no_space(*_: object) -> None:
    raise OSError("no space left")


def fail_and_go_on(target: Path) -> None:
    with atomic_directory(target) as staging:
        assert staging.attempt(len, "abc") == 3
        staging.attempt(no_space)
        assert staging.attempt(len, "abc") is None


def test_nothing_is_tried_after_a_failure(target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"target could not be written: no space left$"):
        fail_and_go_on(target)
    assert contents(target) == OLD


def write_on_two(target: Path, failing: str) -> str:
    mesh = build_mesh(ParallelConfig(tp_size=2))
    try:
        with atomic_directory(target, mesh, stale=("weights-*",)) as staging:
            (staging.path / f"weights-{mesh.ranks['tp']}").write_text("new")
            if mesh.ranks["tp"] == 1 and failing == "raises":
                no_space()
            if mesh.ranks["tp"] == 1 and failing == "attempts":
                staging.attempt(no_space)
    except CheckpointError as error:
        return str(error)
    return "written"


@pytest.mark.parametrize("failing", ["attempts", "raises"])
def test_every_rank_hears_of_a_failure(pools: Pools, target: Path, failing: str) -> None:
    messages = pools(2).run(write_on_two, target, failing)
    assert messages == [f"{target} could not be written: rank 1: no space left"] * 2
    assert contents(target.parent) == {f"target/{name}": text for name, text in OLD.items()}


def test_every_rank_hears_that_the_files_could_not_be_moved(pools: Pools, target: Path) -> None:
    (target / "weights-1").unlink()
    (target / "weights-1").mkdir()
    for message in pools(2).run(write_on_two, target, "nowhere"):
        assert message.startswith(f"{target} could not be written: rank 0: ")
