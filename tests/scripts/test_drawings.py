"""The guides' pictures are what plans and schedules say now."""

import re

import architecture
import pytest
from drawings import FOLDER, drawings
from svg_themes import in_both


def test_they_are_written() -> None:
    found = drawings()
    assert {path.name for path in FOLDER.glob("*.svg")} == found.keys()
    for name, text in found.items():
        if name != "schedules.svg":  # matplotlib's, which every version writes otherwise
            assert (FOLDER / name).read_text() == text, f"{name}: run make docs"


def test_every_drawing_fits_dark_pages() -> None:
    """A style for dark pages lies in it, and what that changes is in the drawing."""
    found = {**drawings(), "architecture.svg": architecture.PAGE.with_suffix(".svg").read_text()}
    for name, text in found.items():
        style, _, body = text.partition("}</style>")
        assert "@media (prefers-color-scheme: dark)" in style, name
        values = set(re.findall(r'="([^"]*#\w+)"', style))
        assert values, name
        grey = {"#d8d8d8"} if name == "tokens.svg" else set()  # where no rank has what another has
        assert {value for value in values if value not in body} == grey, name
    with pytest.raises(ValueError, match="whole drawing"):
        in_both("<p/>", {})
