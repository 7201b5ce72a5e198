"""Libraries outside of the tested range: a warning, or a refusal that says what they lack."""

import multiprocessing
import re
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from torch.distributed.pipelining import _backward

import hfscale
from hfscale._compat import versions
from hfscale.config import environment


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_what_is_accepted_begins_with_what_is_tested(name: str) -> None:
    """The oldest lane's versions are the lowest that pip installs beside hfscale."""
    root = Path(__file__).parents[1]
    lane = dict(
        re.findall(r"(?m)^(\w+)==(\d+\.\d+)", (root / "constraints-oldest.txt").read_text())
    )
    floors = re.findall(rf'"{name}>=(\d+\.\d+)', (root / "pyproject.toml").read_text())
    assert floors == [lane[name]]


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the installed transformers be newer than the tested range, and hfscale be imported anew."""
    asked = [
        "torch>=2.13",
        "transformers>=5.17",
        'transformers<5.0; extra == "tested"',
        'absent<1; extra == "tested"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: asked)
    monkeypatch.delitem(vars(hfscale), "train_step", raising=False)
    monkeypatch.setenv(versions._WARNED, "")  # what was set before is then put back
    monkeypatch.delenv(versions._WARNED)
    versions.check_versions.cache_clear()
    yield
    versions.check_versions.cache_clear()


def test_a_newer_library_warns_once(newer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(
        UserWarning,
        match=r"was not tested with transformers 5\..* \(tested: <5.0\).*hfscale\[tested\]",
    ):
        assert callable(hfscale.train_step)
    monkeypatch.delitem(vars(hfscale), "train_step")
    assert callable(hfscale.train_step)  # pytest makes a second warning an error


def _warned() -> bool:
    versions.check_versions.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        versions.check_versions()
    return bool(said)


@pytest.mark.parametrize("name", environment.RANKS)
def test_other_ranks_of_a_launcher_are_silent(
    newer: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert not _warned()
    monkeypatch.setenv(name, "0")
    assert _warned()


def test_what_a_process_starts_does_not_warn_again(newer: None) -> None:
    """``hfscale train`` starts ranks, a data loader its workers."""
    assert _warned()
    with multiprocessing.get_context("fork").Pool(1) as workers:
        assert not workers.apply(_warned)


def test_a_library_without_a_name_is_refused(newer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_backward, "stage_backward_input")
    monkeypatch.delitem(sys.modules, "hfscale._compat.torch_pipelining")
    with pytest.raises(
        ImportError,
        match=r"(?s)run with transformers 5.*: cannot import name 'stage_backward_input'",
    ):
        _ = hfscale.train_step


def test_the_tested_versions_pass_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ['transformers>=5.17; extra == "tested"'])
    assert versions.untested() == {}
    monkeypatch.setattr(
        metadata,
        "requires",
        lambda _: (_ for _ in ()).throw(metadata.PackageNotFoundError("hfscale")),
    )
    assert versions.untested() == {}
