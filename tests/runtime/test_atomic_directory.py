"""A directory is written on all ranks or on none, and what it held stays until all is whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfscale import CheckpointError, ParallelConfig
from hfscale.mesh import build_mesh
from hfscale.runtime.atomic_directory import atomic_directory
from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]


def contents(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("weights-1", "index", "users"):
        (target / name).write_text("old")
    return target


OLD = {"weights-1": "old", "index": "old", "users": "old"}


def crash(target: Path, replace: bool) -> None:
    with atomic_directory(target, replace=replace, stale=("weights-*",)) as staging:
        (staging.path / "weights").write_text("half")
        raise KeyboardInterrupt


@pytest.mark.parametrize("replace", [False, True])
def test_a_crash_in_the_middle_leaves_the_target_as_it_was(target: Path, replace: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        crash(target, replace)
    assert contents(target.parent) == {f"target/{name}": text for name, text in OLD.items()}


def test_what_a_killed_process_left_is_removed(target: Path) -> None:
    for left in (target / ".incomplete", target.with_name(".target.incomplete")):
        left.mkdir()
        (left / "weights").write_text("half")
    for replace in (False, True):
        with atomic_directory(target, replace=replace) as staging:
            assert not contents(staging.path)
        assert not staging.path.exists()


def test_files_replace_those_of_their_name_and_stale_ones(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, move = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (moved.append(self.name), move(self, to))[1])
    with atomic_directory(target, stale=("weights-*",), last="index") as staging:
        for name in ("weights", "index", "more"):
            (staging.path / name).write_text("new")
        assert contents(target).items() >= OLD.items()
    assert contents(target) == {"weights": "new", "index": "new", "more": "new", "users": "old"}
    assert moved == ["more", "weights", "index"]


def test_a_directory_is_replaced_as_a_whole(target: Path) -> None:
    with atomic_directory(target, replace=True) as staging:
        (staging.path / "state").write_text("new")
    assert contents(target.parent) == {"target/state": "new"}


def no_space() -> None:
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


def write_on_two(target: Path, failing: str, **options: Any) -> str:
    mesh = build_mesh(ParallelConfig(tp_size=2))
    try:
        with atomic_directory(target, mesh, stale=("weights-*",), **options) as staging:
            (staging.path / f"weights-{mesh.ranks['tp']}").write_text("new")
            if mesh.ranks["tp"] == 1 and failing == "raises":
                no_space()
            if mesh.ranks["tp"] == 1 and failing == "attempts":
                staging.attempt(no_space)
    except CheckpointError as error:
        return str(error)
    return "written"


@pytest.mark.parametrize(("replace", "failing"), [(False, "attempts"), (True, "raises")])
def test_every_rank_hears_of_a_failure(pools: Pools, target: Path, replace: bool, failing: str) -> None:
    messages = pools(2).run(write_on_two, target, failing, replace=replace)
    assert messages == [f"{target} could not be written: rank 1: no space left"] * 2
    assert contents(target.parent) == {f"target/{name}": text for name, text in OLD.items()}


def test_every_rank_hears_that_the_files_could_not_be_moved(pools: Pools, target: Path) -> None:
    (target / "weights-1").unlink()
    (target / "weights-1").mkdir()
    for message in pools(2).run(write_on_two, target, "nowhere"):
        assert message.startswith(f"{target} could not be written: rank 0: ")
