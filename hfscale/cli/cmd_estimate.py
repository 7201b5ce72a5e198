"""Estimate the memory and the time of a training step under a layout: each pipeline rank's bytes of weights, gradients,
activations and so on; the seconds of computation, communication and so on; and whether the model fits. Reads only the
config: no weights, no processes, no GPU.
"""

import argparse

from . import model_flags as flags
from .look import check_writable, show

HELP = "estimate seconds and bytes of a training step under a layout"
EXAMPLE = "hfscale estimate Qwen/Qwen3-8B --tp 2 --dp-shard 4 --hardware h100 --microbatches 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model_arguments(parser)
    flags.add_layout_arguments(parser)
    flags.add_machine_arguments(parser)
    flags.add_training_arguments(parser)
    parser.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="sequences per microbatch"
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        metavar="N",
        help="microbatches per step, also without pipeline stages",
    )
    flags.add_reports(parser)


def run(arguments: argparse.Namespace) -> None:
    check_writable(*flags.reports_of(arguments).values())
    from ..cost.tools.estimate import estimate

    layout = flags.layout_of(arguments)
    estimated = estimate(
        flags.load_config(arguments.model, arguments.trust_remote_code),
        layout,
        arguments.hardware,
        sequence_length=arguments.sequence_length,
        batch_size=arguments.batch_size,
        num_microbatches=arguments.accumulate,
        optimizer=arguments.optimizer or flags.OPTIMIZER,
        **flags.plan_arguments(arguments),
    )
    show(arguments, estimated.to_dict(), str(estimated))
    flags.write_reports(arguments, estimated, f"{arguments.model}: {estimated.layout}")
