"""Write the index of the decisions (docs/decisions/README.md): topics, how many decisions each has, their numbers."""

import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "decisions"
_TABLE = "| topic | decisions | numbers |"


def main() -> None:
    """Replace the table of the index by one of the pages beside it, in the order of the old one."""
    index = FOLDER / "README.md"
    words, _, table = index.read_text().partition(_TABLE)
    known = dict.fromkeys(re.findall(r"\]\(([\w-]+\.md)\)", table))
    names = {page.name for page in FOLDER.glob("*.md")} - {index.name}
    ordered = [name for name in known if name in names] + sorted(names - known.keys())
    rows = "".join(f"{_row(FOLDER / name)}\n" for name in ordered)
    index.write_text(f"{words}{_TABLE}\n|---|---|---|\n{rows}")


def _row(page: Path) -> str:
    text = page.read_text()
    title = text.partition(":")[0].removeprefix("# ")
    numbers = sorted(int(number) for number in re.findall(r'(?m)^- <a id="d(\d+)"', text))
    return f"| [{title}]({page.name}) | {len(numbers)} | {_ranges(numbers)} |"


def _ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers in words: ``D1, D3 to D5``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"D{a}" if a == b else f"D{a} to D{b}" for a, b in ranges)


if __name__ == "__main__":
    main()
