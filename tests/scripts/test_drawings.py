"""The guides' pictures are what plans and schedules say now."""

from drawings import FOLDER, drawings


def test_they_are_written() -> None:
    found = drawings()
    assert {path.name for path in FOLDER.glob("*.svg")} == found.keys()
    for name, text in found.items():
        if name != "schedules.svg":  # matplotlib's, which every version writes otherwise
            assert (FOLDER / name).read_text() == text, f"{name}: run make docs"
