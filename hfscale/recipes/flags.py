"""What command lines of recipes have in common."""

import argparse
import math


def add_memory_limit(parser: argparse.ArgumentParser) -> None:
    """``--max-memory[=GIB]``, infinite without a number."""
    parser.add_argument(
        "--max-memory",
        nargs="?",
        const=math.inf,
        type=_gibibytes,
        metavar="GIB",
        help="say what memory each rank needs; with a number, stop before training where it is more",
    )


def memory_limit_flags(limit: float | None) -> list[str]:
    """The flags that say ``limit`` on another command line."""
    if limit is None:
        return []
    return ["--max-memory"] if math.isinf(limit) else [f"--max-memory={limit:g}"]


def _gibibytes(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Where the flag stands before an override, the parser takes that for its number.
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of GiB: write --max-memory=40, or --max-memory alone behind everything else"
        ) from None
