"""``hfscale inspect`` says what is there, and ``check_save`` what a save will take."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale import CheckpointError
from hfscale.cli import main
from hfscale.testing import RankPool

from .state_runs import build, make_optimizer, steps

Pools = Callable[[int], RankPool]


def run(layout: str) -> tuple[Any, Any]:
    model = build("tied", layout, 0, torch.float32)
    optimizer = make_optimizer(model, "stock")
    steps(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), range(1))
    return model, optimizer


def written(directory: str) -> None:
    model, optimizer = run("pp2-tp2")
    for step in (1, 2):
        hfscale.save_state(model, f"{directory}/step-{step}", optimizer=optimizer, step=step)


def test_states(pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pools(4).run(written, str(tmp_path))
    assert main(["inspect", f"{tmp_path}/step-1"]) == 0
    out = capsys.readouterr().out
    assert "a state of a model, step 1" in out
    assert "layout: pp2 x tp2, 4 ranks, 1 distinct batches" in out
    assert "pipeline rank 1: layers 2-3" in out
    assert "  weights: 52 tensors" in out
    assert "written by hfscale" in out
    (tmp_path / "step-2" / "rank-00003.pt").unlink()
    assert main(["inspect", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "2 states, the newest first" in out
    assert "step-2: not whole: rank-00003.pt is missing" in out
    assert "step-1: whole, written 2" in out
    assert main(["inspect", str(tmp_path / "step-2"), "--quick"]) == 1


def test_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = run("one")
    hfscale.save_pretrained(model, tmp_path / "out")
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "a Hugging Face checkpoint, 1 files, 52 tensors" in capsys.readouterr().out
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["inspect", str(tmp_path / "out")]) == 1
    assert "not whole: " in capsys.readouterr().out
    assert main(["inspect", str(tmp_path)]) == 2


def checked(directory: str) -> hfscale.SaveCheck:
    model, optimizer = run("tp2")
    before = [p.clone() for p in model.parameters()]
    found = hfscale.check_save(model, optimizer, directory)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return found


def test_a_save_is_checked(pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in pools(2).run(checked, str(tmp_path / "states")):
        assert found.bytes > 100_000
        assert 0 < found.save_seconds < 60
    assert list((tmp_path / "states").iterdir()) == []
    model, optimizer = run("one")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"two states of [\d,]+ bytes.*has 1,000 bytes free"):
        hfscale.check_save(model, optimizer, tmp_path / "states")
