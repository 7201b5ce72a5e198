"""The code of the notebooks runs, cell after cell, in a process of its own, and prints what they show."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("scripts/notebooks/*.ipynb"))


def cells(notebook: Path) -> list[dict[str, object]]:
    return [
        cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    code = "\n\n".join("".join(cell["source"]) for cell in cells(notebook))
    (tmp_path / "cells.py").write_text(code)
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        given.pop(name, None)
    run = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=given, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    shown = "".join(
        text for cell in cells(notebook) for output in cell["outputs"] for text in output["text"]
    )
    for line in re.findall(
        r"(?m)^(?:step \d+: loss \d\.\d\d\d|weights and optimizer .*|equal to rounding)", shown
    ):
        assert line in run.stdout


def test_notebooks_are_short_and_show_results() -> None:
    assert len(NOTEBOOKS) == 2
    for notebook in NOTEBOOKS:
        assert len(json.loads(notebook.read_text())["cells"]) <= 12
        assert any(cell["outputs"] for cell in cells(notebook))
