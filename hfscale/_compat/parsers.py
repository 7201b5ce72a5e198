"""The arguments of a parser, which argparse keeps to itself."""

import argparse
from collections.abc import Sequence


def arguments_of(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """Return the arguments of a parser, in order, those of its groups included."""
    return parser._actions


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return flag -> argument, for flags that begin with two dashes."""
    return {flag: each for each in arguments_of(parser) for flag in each.option_strings if flag.startswith("--")}
