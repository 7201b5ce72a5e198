"""``hfscale verify``: a layout proved on a tiny clone of the model."""

import argparse

from .layout import add_layout_arguments, layout_of
from .model import add_model_arguments, load_config, remote_code

HELP = "prove a layout on this machine: a tiny clone of the model against one process"
DESCRIPTION = (
    "Train a tiny clone of a model (same classes, few layers, small widths) in a layout on CPU processes and in one "
    "process with stock transformers, and compare loss, gradients, norm, weights and checkpoint. Exits with 1 on any "
    "difference. Needs no weights and no GPU."
)
EXAMPLE = "hfscale verify Qwen/Qwen3-8B --tp 2 --pp 2 --schedule zbv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``hfscale verify``."""
    add_model_arguments(parser)
    add_layout_arguments(parser)
    parser.add_argument(
        "--lora",
        metavar="TARGETS",
        nargs="?",
        const="all-linear",
        help="train LoRA adapters instead, against stock PEFT: all-linear (the default), or names joined by commas",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare, and print the differences."""
    import transformers

    from ..testing.verify import TOLERANCE, render, verify

    transformers.utils.logging.disable_progress_bar()  # of a clone's few kilobytes
    asked, config = layout_of(arguments), load_config(arguments.model, arguments.trust_remote_code)
    used, parity = verify(config, asked, lora=arguments.lora, **remote_code(arguments))
    print(render(config, asked, used, parity, arguments.lora))
    return int(parity.worst() > TOLERANCE)
