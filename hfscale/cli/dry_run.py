"""``hfscale plan MODEL --dry-run``: count a step of every kind of stage, beside the estimate."""

import argparse
from typing import Any

from ..errors import ConfigError
from .flags import plan_arguments
from .layout import layout_of
from .look import bar, print_json
from .memory import tokens_asked
from .model import auto_class_of, building, remote_code

_OTHERS = ("quantize", "optimizer", "gpu")


def add_dry_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--dry-run``."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="let one rank of every kind of stage take a step without weights, and count what it sends and keeps "
        "(a microbatch is one sequence of --tokens; --microbatches of a step)",
    )


def run(arguments: argparse.Namespace, config: Any) -> int:
    """Run the dry run, and print its counts.

    Raises:
        ConfigError: quantized weights or an optimizer are requested, which a dry run does not have.
    """
    from ..cost.tools.dry_run import dry_run
    from ..memory_config import MemoryConfig

    beside = [f"--{name}" for name in _OTHERS if getattr(arguments, name) is not None]
    if beside:
        raise ConfigError(
            f"--dry-run takes weights as they are, and nothing is updated: leave {', '.join(beside)} out, or use "
            "hfscale estimate"
        )
    layout = layout_of(arguments)
    with building(arguments, config), bar() as progress:
        found = dry_run(
            config,
            layout,
            sequence_length=tokens_asked(arguments),
            mixed_precision=arguments.mixed_precision or "no",
            dtype=arguments.dtype,
            memory=MemoryConfig(recompute="full") if arguments.recompute else None,
            auto_class=auto_class_of(arguments.auto_class),
            progress=progress,
            **plan_arguments(arguments),
            **remote_code(arguments),
        )
    if arguments.json:
        print_json(found.to_dict())
    else:
        print(found)
    return 0
