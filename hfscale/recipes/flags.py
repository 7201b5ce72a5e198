"""Share command-line flags between the commands that run recipes."""

import argparse
import math

from ..config.memory import byte_count


def add_memory_limit(parser: argparse.ArgumentParser) -> None:
    """Add ``--max-memory[=SIZE]``, infinite without a number."""
    parser.add_argument(
        "--max-memory",
        nargs="?",
        const=math.inf,
        type=_gibibytes,
        metavar="SIZE",
        help="say what memory each rank needs; with a size, as 40GiB, 40 or 40GB, stop before training if it is more",
    )


def memory_limit_flags(limit: float | None) -> list[str]:
    """Return the flags that pass ``limit`` to another command line."""
    if limit is None:
        return []
    # every digit of a size in 10^9 bytes
    return ["--max-memory"] if math.isinf(limit) else [f"--max-memory={limit:.12g}"]


def _gibibytes(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        found = byte_count(text)
    if not found:
        # Where the flag stands before an override, the parser takes that for its number.
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: write --max-memory=40GiB (40 means the same), or --max-memory alone at the end"
        )
    return found / 2**30
