"""``hfscale estimate``: estimate seconds and bytes of a step under a layout."""

import argparse

from .look import add_json, check_writable, show
from .model_flags import (
    OPTIMIZER,
    add_html,
    add_layout_arguments,
    add_machine_arguments,
    add_model_arguments,
    add_training_arguments,
    layout_of,
    load_config,
    plan_arguments,
    write_html,
)

HELP = "estimate seconds and bytes of a training step under a layout"
DESCRIPTION = (
    "Estimate what a training step of a model takes and holds under a layout: for every pipeline rank bytes by kind, "
    "for the step seconds by term, and whether it fits. Reads only the config: no weights, no processes, no GPU."
)
EXAMPLE = "hfscale estimate Qwen/Qwen3-8B --tp 2 --dp-shard 4 --hardware h100 --microbatches 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_layout_arguments(parser)
    add_machine_arguments(parser)
    add_training_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences of one microbatch")
    parser.add_argument("--accumulate", type=int, metavar="N", help="microbatches of a step, also without stages")
    add_html(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    check_writable(arguments.html)
    from ..cost.tools.estimate import estimate

    layout = layout_of(arguments)
    found = estimate(
        load_config(arguments.model, arguments.trust_remote_code),
        layout,
        arguments.hardware,
        sequence_length=arguments.sequence_length,
        batch_size=arguments.batch_size,
        num_microbatches=arguments.accumulate,
        optimizer=arguments.optimizer or OPTIMIZER,
        **plan_arguments(arguments),
    )
    show(arguments, found.to_dict(), str(found))
    write_html(arguments.html, found, f"{arguments.model}: {found.layout}")
