"""The directory that a command writes: one that has something in it already is left alone unless that is asked for."""

import argparse
from pathlib import Path

from ..errors import ConfigError

_STAGING = ".incomplete"  # what a killed command leaves, which the next one removes


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """``--overwrite``, for a command that writes a directory."""
    parser.add_argument(
        "--overwrite", action="store_true", help="write into OUT though it has files: those of the same names, and "
        "weights, are replaced, others stay"
    )  # fmt: skip


def check_target(out: Path, overwrite: bool, **sources: Path | str) -> None:
    """Refuse a directory that would lose what is in it; imports nothing, so that it is said at once.

    Args:
        overwrite: whether it may lose it.
        sources: name of an argument -> what the command reads, which it may not write into in any case.

    Raises:
        ConfigError: it has files already, is a file, or is what the command reads.
    """
    for name, source in sources.items():
        if out.resolve() == Path(source).resolve():
            raise ConfigError(f"OUT {out} is {name} as well, which is read: name another directory, so that it is kept")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"OUT {out} is a file: name a directory")
    found = sorted(path.name for path in out.iterdir() if path.name != _STAGING) if out.exists() else []
    if found and not overwrite:
        shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise ConfigError(
            f"OUT {out} has files already ({shown}): name another directory, or replace them (--overwrite)"
        )
