"""Private names of Python's standard library: daemon processes' right to children, and a parser's arguments."""

import argparse
import multiprocessing
from collections.abc import Sequence
from typing import Any, Protocol


class Adds(Protocol):
    """A parser, or an argument group of one."""

    def add_argument(self, *flags: str, **options: Any) -> argparse.Action:
        """Add an argument."""


def may_have_children() -> None:
    """Let this daemon process start others (loaders' workers), which Python forbids."""
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False


def arguments_of(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """Return the arguments of a parser, in order, those of its groups included."""
    return parser._actions


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return flag -> argument, for flags that begin with two dashes."""
    return {
        flag: each
        for each in arguments_of(parser)
        for flag in each.option_strings
        if flag.startswith("--")
    }
