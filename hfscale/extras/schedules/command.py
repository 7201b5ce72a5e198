"""Draw the timeline of a pipeline schedule: rows are ranks, and the number in a box is the microbatch. Reads no model
and starts no processes.
"""

import argparse
from pathlib import Path

from ...cli.look import check_writable
from ...config.schedules import schedule_names
from ...errors import ConfigError

HELP = "draw a pipeline schedule, and next to it a recorded run"
EXAMPLE = "hfscale schedule zbv --pp 4 --microbatches 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME",
        help=f"one of {', '.join(schedule_names())}, or a .csv file (default: the trace's, 1f1b)",
    )  # fmt: skip
    parser.add_argument(
        "--schedule", metavar="NAME", help="the same as NAME, for the flag that other commands use"
    )
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline ranks")
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="microbatches of one step (default: 2 per rank)",
    )
    parser.add_argument("--virtual-stages", type=int, metavar="N", help="stages per rank")
    parser.add_argument(
        "--transfer",
        type=float,
        metavar="T",
        help="time of a transfer, in forward passes of a stage (default: 0)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="consecutive steps to draw, for a schedule without a flush",
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the order of actions, in torch's format"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw a picture: .png or .svg")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a recorded trace of a run, to draw below the plan",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="step of the trace (default: the last complete one)"
    )
    parser.add_argument(
        "--save-trace",
        type=Path,
        metavar="FILE",
        help="write the plan as a trace that Perfetto opens",
    )
    parser.add_argument(
        "--width", type=int, metavar="N", help="columns to draw in (default: the terminal's)"
    )
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="(default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    asked = {arguments.name, arguments.schedule} - {None}
    if len(asked) > 1:
        raise ConfigError(
            f"two schedules are named, {arguments.name} and --schedule {arguments.schedule}: name only one"
        )
    arguments.schedule = next(iter(asked), None)
    check_writable(arguments.csv, arguments.out, arguments.save_trace)
    from .draw import run_schedule

    run_schedule(arguments)
