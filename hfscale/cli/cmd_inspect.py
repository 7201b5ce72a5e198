"""Describe a directory that hfscale.save_state or save_pretrained wrote: step, layout, tensors, bytes, versions. For a
directory of several states, describe each state. For another trainer's directory, print its format and the command
that reads it. Exits with 1 if anything is incomplete or unreadable. Needs no ranks and no GPU.
"""

import argparse
from pathlib import Path

from .look import show

HELP = "describe a saved state or checkpoint, and check that it is complete"
EXAMPLE = "hfscale inspect states"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        help="a state, a directory of states, or a checkpoint",
    )
    parser.add_argument(
        "--quick", action="store_true", help="compare file sizes only, without reading whole files"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..checkpoint.convert import inspect

    text, whole = inspect(arguments.directory, verify=not arguments.quick)
    show(
        arguments,
        {"directory": arguments.directory, "whole": whole, "lines": text.splitlines()},
        text,
    )
    return int(not whole)
