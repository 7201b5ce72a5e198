"""Scripts of ``make test-all`` run rarely: what they import from each other and from hfscale is there."""

import importlib
from pathlib import Path

import pytest

SCRIPTS = {path.stem for path in (Path(__file__).parents[2] / "scripts").glob("*.py")}
APART = {"check_checkpoint"}  # keeps hfscale out of its process; demos run it


@pytest.mark.parametrize("name", sorted(SCRIPTS - APART))
def test_a_script_imports(name: str) -> None:
    importlib.import_module(name)
