"""The table of levers and axes is what plans say."""

import pytest
from memory_table import AXES, LEVERS, PAGE, page, reason


@pytest.mark.slow
def test_it_is_written() -> None:
    text = PAGE.read_text()
    assert page(text) == text


@pytest.mark.parametrize("lever", LEVERS)
def test_what_is_refused_says_what_works(lever: str) -> None:
    for axes in AXES.values():
        why = reason(LEVERS[lever], axes)
        assert not why or "use " in why
