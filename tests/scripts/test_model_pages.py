"""Pages of well-known models show what their commands print, and their scripts print the same in any layout."""

import re
from pathlib import Path

import model_pages
import pytest

from hfscale.cli import _parser

NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.mark.parametrize("page", model_pages.PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_a_script_and_shows_what_commands_print(page: Path) -> None:
    text = page.read_text()
    assert text.index("```python") < 600
    script = model_pages.SCRIPT.search(text)
    two = script[3].splitlines()
    one = script[5].splitlines()
    assert len(two) == len(one) == 3
    for line, other in zip(two, one, strict=True):
        assert line.startswith("step ")
        assert [float(x) for x in NUMBER.findall(line)] == pytest.approx(
            [float(x) for x in NUMBER.findall(other)], abs=2e-4
        )
    shown = [
        line
        for block in model_pages.COMMANDS.findall(text)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    asked = [index for index, line in enumerate(shown) if line.startswith("$ hfscale ")]
    assert asked
    for index in asked:
        words = shown[index].split()[2:]
        assert words[1] in model_pages.CONFIGS
        _parser().parse_args(words)
        assert " GiB" in shown[index + 1]  # a verdict, or a plan's head


@pytest.mark.slow
@pytest.mark.parametrize("page", model_pages.PAGES, ids=lambda page: page.stem)
def test_a_page_is_current(page: Path, tmp_path: Path) -> None:
    assert model_pages.filled(page.read_text(), tmp_path) == page.read_text()
