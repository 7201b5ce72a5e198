"""A recipe's run that is struck comes back, and ends like one that is not."""

import random
import re
from pathlib import Path

import pytest
import yaml

from hfscale.cli import main
from hfscale.extras.states_in_memory import drill
from hfscale.extras.states_in_memory.drill import Strike, _report

TINY = {
    "name": "tiny",
    "parallel": {"dp_shard_size": 2},
    "data": {
        "source": "text",
        "sequence_length": 32,
        "validation_fraction": 0.3,
        "validation_sequences": 4,
    },
    "model": {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    },
    "training": {"steps": 8, "batch_size": 4, "evaluate_every": 8, "save_every": 2},
}


def test_too_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    assert main(["drill", "tiny.yaml", "--kills", "5"]) == 2
    assert (
        "5 kills need at least 10 training steps, but training.steps=8" in capsys.readouterr().err
    )


def test_the_report() -> None:
    strikes = [
        Strike("rank", 1, 7, 2, 12.0),
        Strike("stop", 0, 9, 0, 0.1),
        Strike("all", 0, 11, 0, 14.0),
    ]
    text = _report(strikes, 60, 100, [3, 4], [])
    assert "median 13.0 s, at most 14.0 s" in text
    assert (
        "medians by kind: rank 12.0 (1), all 14.0 (1), stop 0.1 (1)\nimports alone: 3.0 to 4.0 s"
        in text
    )
    assert "steps lost: median 0, at most 2" in text
    assert "effective time: 60.0%" in text
    assert text.endswith("bit for bit")
    assert _report(strikes, 60, 100, [3, 4], ["losses"]).endswith("the end differs in losses")


@pytest.mark.parametrize(
    ("kills", "kinds", "steps", "ranks"),
    [
        (1, ("rank",), 4, 1),  # the fewest processes: each imports everything
        pytest.param(1, ("rank",), 8, 2, marks=pytest.mark.slow),
        pytest.param(100, drill.KINDS, 1600, 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_struck(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kills: int,
    kinds: tuple[str, ...],
    steps: int,
    ranks: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drill, "_imports", lambda _: 0.0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(drill, "KINDS", kinds)
    Path("text").mkdir()
    words = [
        "def",
        "one",
        "two",
        "three",
        "return",
        "for",
        "in",
        "while",
        "if",
        "else",
        "None",
        "True",
    ]
    for number in range(8):
        told = random.Random(number)
        Path("text", f"{number}.txt").write_text(" ".join(told.choice(words) for _ in range(1500)))
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    asked = [f"parallel.dp_shard_size={ranks}"]
    asked += [f"training.{name}={steps}" for name in ("steps", "evaluate_every")]
    asked += [f"training.save_every={steps // 4}", "training.memory_every=2"]
    assert main(["drill", "tiny.yaml", *asked, "--kills", str(kills), "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "equals the undisturbed run's, bit for bit" in said
    assert int(re.findall(r"steps lost: median .*, at most (\d+)", said)[0]) <= 4
