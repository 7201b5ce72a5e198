"""Check the directory that a command writes: its files are kept unless overwriting is requested."""

import argparse
from pathlib import Path

from ..errors import ConfigError

_STAGING = ".incomplete"  # left by a killed command, and removed by the next one


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add ``--overwrite``, for a command that writes a directory."""
    parser.add_argument(
        "--overwrite", action="store_true", help="write into OUT though it has files: those of the same names, and "
        "weights, are replaced, others stay"
    )  # fmt: skip


def check_target(out: Path, overwrite: bool, **sources: Path | str) -> None:
    """Refuse, without slow imports, a directory with files unless ``overwrite``, and one that is among ``sources``:
    name of an argument -> a path that the command reads, into which it never writes.
    """
    for name, source in sources.items():
        if out.resolve() == Path(source).resolve():
            raise ConfigError(f"OUT {out} must not be {name}, which is read: name another directory")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"OUT {out} is a file: name a directory")
    found = sorted(path.name for path in out.iterdir() if path.name != _STAGING) if out.exists() else []
    if found and not overwrite:
        shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise ConfigError(
            f"OUT {out} has files already ({shown}): name another directory, or replace them (--overwrite)"
        )
