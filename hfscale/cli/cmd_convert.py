"""``hfscale convert``: write a Hugging Face directory from a training state."""

import argparse
from pathlib import Path

from .amounts import bytes_of
from .look import add_json, show
from .output_directory import add_overwrite, check_target

HELP = "make a Hugging Face directory of a saved state"
DESCRIPTION = (
    "Write the weights of a state that hfscale.save_state wrote, in whatever layout, as an ordinary Hugging Face "
    "directory; of a model with adapters, the adapter. One process, one tensor in memory at a time, no GPU."
)
EXAMPLE = "hfscale convert states/step-500 out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hfscale convert``."""
    parser.add_argument("state", metavar="DIR", type=Path, help="of a state, or of several: the newest whole one")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that came with the model")
    add_overwrite(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert the state, and print what was written."""
    check_target(arguments.out, arguments.overwrite, DIR=arguments.state)
    from ..checkpoint.convert import convert_state

    index = convert_state(
        arguments.state,
        arguments.out,
        max_shard_size=bytes_of(arguments.max_shard_size, "--max-shard-size"),
        trust_remote_code=arguments.trust_remote_code,
    )
    what = "an adapter" if index.adapter else "a model"
    at = "" if index.step is None else f" of step {index.step}"
    found = {"directory": arguments.out, "holds": what, "step": index.step, "tensors": len(index.stored)}
    show(arguments, found, f"{arguments.out}: {what}{at}, {len(index.stored)} tensors")
    return 0
