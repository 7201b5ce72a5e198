"""Official example scripts, with the lines that their pages change, train as the stock ones do."""

import re
from pathlib import Path

import official_examples
import pytest
from official_examples import EXAMPLES, Example

ROOT = Path(__file__).parents[2]
_OF_TRL = [example for example in EXAMPLES if "trl" in example.page]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.page)
def test_a_page_shows_the_changed_lines_and_equal_numbers(example: Example) -> None:
    text = (ROOT / "docs" / example.page).read_text()
    assert official_examples.difference(example) in text
    rows = re.findall(r"(?m)^\| (?:\d+|evaluation[^|]*) \| (.*) \|$", text)
    assert len(rows) >= official_examples.STEPS
    for row in rows:
        stock, *others = (
            [float(number) for number in cell.split(", ")] for cell in row.split(" | ")
        )
        assert others
        for other in others:
            assert other == pytest.approx(stock, abs=2e-4)


@pytest.mark.parametrize("example", _OF_TRL, ids=lambda example: example.page)
def test_the_lines_are_those_of_the_installed_script(example: Example) -> None:
    script = official_examples.source(example, None)
    assert "from hfscale.trl import" in official_examples.changed(script.read_text(), example)


@pytest.mark.slow
def test_trl_sft_with_one_line_changed_is_equal(tmp_path: Path) -> None:
    (example,) = (each for each in _OF_TRL if each.file == "sft.py")
    official_examples.prepare(tmp_path)
    text = official_examples.source(example, None).read_text()
    (tmp_path / "stock.py").write_text(text)
    (tmp_path / "tp.py").write_text(official_examples.changed(text, example))
    expected = official_examples.log(tmp_path, "stock.py", example.here)
    found = official_examples.log(tmp_path, "tp.py", example.here, "TP_SIZE")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
