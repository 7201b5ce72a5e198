"""One look for all subcommands: what is under way, tables, and JSON."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``: for programs."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def print_json(document: Any) -> None:
    """A document for programs, and nothing else on the standard output."""
    print(json.dumps(document, indent=1, default=str))


def check_writable(*files: Path | None) -> None:
    """Refuse files that cannot be written before what goes into them is worked out.

    Raises:
        ConfigError: one of them is to lie in no folder.
    """
    for path in filter(None, files):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: {path.parent} is not a folder")


def check_directory(directory: Path, of: str) -> None:
    """Refuse a directory that is none; imports nothing, so that it is said at once.

    Raises:
        ConfigError: it does not exist, or is a file.
    """
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(f"{directory} {found}: give the directory of {of}")


def working(what: str) -> None:
    """Say what takes a while, where a person is looking."""
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar, where a person is looking; call what it gives with what is under way, its number, and of how
    many.
    """
    from tqdm import tqdm

    with tqdm(total=1, disable=not sys.stderr.isatty(), bar_format="{l_bar}{bar}| {elapsed}") as shown:

        def progress(what: str, number: int, of: int) -> None:
            shown.set_description(what, refresh=False)
            shown.total, shown.n = of, number
            shown.refresh()

        yield progress


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns as wide as they need to be; those whose place is in ``right`` end alike."""
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(head), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(line, rows)])
