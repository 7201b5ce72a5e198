"""Draw the rooms of hfscale and who imports whom; write docs/architecture.svg and the list in docs/architecture.md.

python scripts/architecture.py [--check]

Rooms and their order are the layers in pyproject.toml, the arrows are counted from the sources, every import included
(type-checking ones, and those inside functions). Needs the standard library alone. With ``--check`` it writes nothing,
and exits with 1 where the list in docs/architecture.md is not current; the picture's counts may be older.
"""

import argparse
import ast
import re
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import tomllib
from svg_themes import GROUND, INK, in_both

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hfscale"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- written by scripts/architecture.py -->"
END = "<!-- end -->"
_SPLIT = ("parallel",)  # rooms whose folders are rooms of their own
_CELL = 27
_LABEL = 250
_TOP = 120
_DARK = {
    'rect[fill="white"]': f"fill: {GROUND}",
    'rect[fill="#eef3fa"]': "fill: #2a3142",
    'rect[fill="#ddd"]': "fill: #444a57",
    'line[stroke="#bbb"]': "stroke: #565d6b",
    'text:not([fill]), text[fill="#333"], text[fill="#555"]': f"fill: {INK}",
}


@dataclass(frozen=True)
class Room:
    """A file or a folder of the package.

    Attributes:
        name: as in ``parallel/tensor``.
        layer: 0 for the lowest.
        about: the first sentence of its docstring.
        lengths: lines of each of its files.
    """

    name: str
    layer: int
    about: str
    lengths: tuple[int, ...]


def find_rooms() -> list[Room]:
    """All rooms, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rooms = []
    for depth, layer in enumerate(layers):
        for name in (text.strip(" ()").replace(".", "/") for text in re.split(r"[|:]", layer)):
            inner = [f"{name}/{path.name}" for path in sorted((PACKAGE / name).glob("[a-z]*/"))]
            for each in inner if name in _SPLIT else [name]:
                rooms.append(_room(each, len(layers) - 1 - depth))
    return rooms


def _room(name: str, layer: int) -> Room:
    path = PACKAGE / name
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    head = path / "__init__.py" if path.is_dir() else files[0]
    text = " ".join(
        (ast.get_docstring(ast.parse(head.read_text())) or "").partition("\n\n")[0].split()
    )
    lengths = tuple(len(file.read_text().splitlines()) for file in files)
    return Room(name, layer, text.replace("``", "`").replace("|", "\\|"), lengths)


def count_imports(rooms: list[Room]) -> Counter[tuple[str, str]]:
    """(importing room, imported room) -> pairs of files."""
    names = {room.name for room in rooms}
    modules = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    found: Counter[tuple[str, str]] = Counter()
    for module, path in modules.items():
        here = _room_of(module, names)
        others = (_room_of(other, names) for other in _imported(module, path, modules))
        found.update((here, there) for there in others if here and there and there != here)
    return found


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(module: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a file imports."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {
                f"{name}.{alias.name}" if f"{name}.{alias.name}" in modules else name
                for alias in node.names
            }
    return {name for name in found if name in modules and name != module}


def _room_of(module: str, names: set[str]) -> str:
    parts = module.split(".")[1:]
    return next((name for name in ("/".join(parts[:2]), "/".join(parts[:1])) if name in names), "")


def picture(rooms: list[Room], imports: Counter[tuple[str, str]]) -> str:
    """The rooms as boxes, layer below layer, and beside them a cell for every arrow: the row imports the column."""
    size = len(rooms)
    width = _LABEL + size * _CELL + 20
    height = _TOP + size * _CELL + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, room in enumerate(rooms):
        y = _TOP + row * _CELL
        if row and rooms[row - 1].layer != room.layer:
            lines.append(f'<line x1="8" y1="{y}" x2="{width - 20}" y2="{y}" stroke="#bbb"/>')
        lines.append(
            f'<rect x="10" y="{y + 3}" width="{_LABEL - 20}" height="{_CELL - 6}" rx="4" fill="#eef3fa" '
            'stroke="#4a6fa5"/>'
        )
        files = f"{len(room.lengths)} file{'s' if len(room.lengths) > 1 else ''}"
        lines.append(f'<text x="18" y="{y + 17}" font-weight="bold">{escape(room.name)}</text>')
        lines.append(
            f'<text x="{_LABEL - 16}" y="{y + 17}" text-anchor="end" fill="#555">{files}</text>'
        )
        x = _LABEL + row * _CELL
        lines.append(
            f'<text transform="translate({x + 17},{_TOP - 6}) rotate(-60)" font-size="10">{escape(room.name)}</text>'
        )
        lines.append(f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="#ddd"/>')
    lines += [_cell(rooms, *pair, count) for pair, count in sorted(imports.items())]
    upward = sum(count for (a, b), count in imports.items() if _layer(rooms, a) <= _layer(rooms, b))
    words = (
        f"{sum(imports.values())} imports between {size} rooms, {upward} of them upward or within a layer. "
        "The room of a row imports that of a column; numbers are pairs of files."
    )
    lines.append(f'<text x="10" y="{height - 24}" fill="#333">{escape(words)}</text>')
    return in_both("\n".join([*lines, "</svg>"]) + "\n", _DARK)


def _layer(rooms: list[Room], name: str) -> int:
    return next(room.layer for room in rooms if room.name == name)


def _cell(rooms: list[Room], importer: str, imported: str, count: int) -> str:
    names = [room.name for room in rooms]
    x = _LABEL + names.index(imported) * _CELL
    y = _TOP + names.index(importer) * _CELL
    upward = _layer(rooms, importer) <= _layer(rooms, imported)
    shade = "#d33" if upward else f"rgb({(level := max(90, 225 - 12 * count))},{level + 15},245)"
    ink = "white" if upward or count > 6 else "#123"
    return (
        f'<g><title>{escape(importer)} imports {escape(imported)}: {count}</title><rect x="{x + 1}" y="{y + 1}" '
        f'width="{_CELL - 2}" height="{_CELL - 2}" fill="{shade}"/><text x="{x + _CELL / 2}" y="{y + 17}" '
        f'text-anchor="middle" font-size="10" fill="{ink}">{count}</text></g>'
    )


def table(rooms: list[Room]) -> str:
    """The rooms in one line each, the highest first."""
    lines = ["| room | |", "|---|---|"]
    for room in rooms:
        link = f"../hfscale/{room.name}" + ("" if (PACKAGE / room.name).is_dir() else ".py")
        lines.append(f"| [{room.name}]({link}) | {room.about} |")
    return "\n".join(lines)


def filled(page: str, rooms: list[Room]) -> str:
    """The page with a current list."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{PAGE} needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table(rooms)}\n\n{END}{after}"


def main() -> int:
    """Write both, or compare the list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    rooms = find_rooms()
    text = PAGE.read_text()
    if arguments.check:
        return int(filled(text, rooms) != text)
    PAGE.write_text(filled(text, rooms))
    PAGE.with_suffix(".svg").write_text(picture(rooms, count_imports(rooms)))
    lengths = [length for room in rooms for length in room.lengths]
    median = f"{statistics.median(lengths):.0f}"
    print(f"{len(lengths)} files, median {median} lines, longest {max(lengths)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
