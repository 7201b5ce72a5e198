"""Libraries outside of the tested range: a warning, or a refusal that says what they lack."""

import sys
from collections.abc import Iterator
from importlib import metadata

import pytest
from torch.distributed.pipelining import _backward

import hfscale
from hfscale._compat import versions


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the installed transformers be newer than the tested range, and hfscale be imported anew."""
    asked = ["torch>=2.11", "transformers>=5.17", 'transformers<5.0; extra == "tested"', 'absent<1; extra == "tested"']
    monkeypatch.setattr(metadata, "requires", lambda _: asked)
    monkeypatch.delitem(vars(hfscale), "train_step", raising=False)
    versions.check_versions.cache_clear()
    yield
    versions.check_versions.cache_clear()


def test_a_newer_library_warns_once(newer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"was not tested with transformers 5\..* \(tested: <5.0\).*hfscale\[tested\]"):
        assert callable(hfscale.train_step)
    monkeypatch.delitem(vars(hfscale), "train_step")
    assert callable(hfscale.train_step)  # pytest makes a second warning an error


def test_a_library_without_a_name_is_refused(newer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_backward, "stage_backward_input")
    monkeypatch.delitem(sys.modules, "hfscale._compat.torch_pipelining")
    with pytest.raises(ImportError, match=r"(?s)run with transformers 5.*: cannot import name 'stage_backward_input'"):
        _ = hfscale.train_step


def test_the_tested_versions_pass_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ['transformers>=5.17; extra == "tested"'])
    assert versions.untested() == {}
    monkeypatch.setattr(metadata, "requires", lambda _: (_ for _ in ()).throw(metadata.PackageNotFoundError("hfscale")))
    assert versions.untested() == {}
