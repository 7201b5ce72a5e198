"""Say what a directory holds that hfscale.save_state or save_pretrained wrote: step, layout, tensors, bytes, versions;
of several states, each; of another trainer's directory its form, and the command that reads it. Exits with 1 where
something is not whole, or not read. Needs no ranks and no GPU.
"""

import argparse
from pathlib import Path

from .look import show

HELP = "say what a saved state or checkpoint holds, and whether it is whole"
EXAMPLE = "hfscale inspect states"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="a state, several, or a checkpoint"
    )
    parser.add_argument(
        "--quick", action="store_true", help="compare sizes only: read no file to its end"
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
