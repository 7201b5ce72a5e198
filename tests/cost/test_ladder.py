"""Levers added in turn: what is counted of a clone is what is estimated of it."""

import json
from pathlib import Path

import pytest

from scripts.memory_ladder import LADDER, Rung, Step, climb, main

from ..tiny_models import tiny


def check(steps: list[Step]) -> None:
    for step in steps:
        assert step.ratio == pytest.approx(1.0, abs=0.03), step.name
    totals = [sum(step.counted.values()) for step in steps]
    assert totals == sorted(totals, reverse=True)
    assert all(step.model is not None and step.model.total > 0 for step in steps)


def rungs(*names: str) -> list[Rung]:
    return [rung for rung in LADDER if rung.name in names]


@pytest.mark.slow
def test_on_one_rank() -> None:
    check(climb(tiny("llama"), 256, rungs("float32", "8-bit optimizer", "offload", "QLoRA")))


@pytest.mark.slow
def test_every_rung(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(climb(tiny("llama"), 256))
    tiny("llama").save_pretrained(tmp_path)
    main([str(tmp_path), "--json"])
    assert [step["lever"] for step in json.loads(capsys.readouterr().out)] == [
        rung.name for rung in LADDER
    ]
    picture = tmp_path / "ladder.png"
    main([str(tmp_path), "--out", str(picture)])
    assert "8-bit optimizer" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
