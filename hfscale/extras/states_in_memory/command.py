"""Run a recipe under torch's elastic agent twice: undisturbed, and with ranks that are killed in steps, saves and
loads, or stopped for a while. Prints the seconds from each kill to the next step, the lost steps, and the effective
time. Exits with 1 if the results differ in any bit. Results go to runs/<name>-drill-plain and runs/<name>-drill,
replacing earlier ones.
"""

import argparse

from ...cli.look import working
from ...recipes import check_installed

HELP = "rehearse failures: kill and stop ranks of a run at random, and compare its results"
JSON = False
COUNTS = ("kills",)
EXAMPLE = (
    """hfscale drill demo_pretrain training.steps=60 training.save_every=5 --kills 20 --seed 1"""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a YAML file, or a name that hfscale train --list shows"
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="recipe keys to override, such as training.steps=20",
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=5,
        metavar="N",
        help="how often to kill or stop ranks (default: 5)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the kinds, ranks and moments (default: 0)",
    )


def run(arguments: argparse.Namespace) -> int:
    check_installed()
    from .drill import drill

    working("running the recipe, undisturbed and disturbed")
    report, alike = drill(arguments.recipe, arguments.overrides, arguments.kills, arguments.seed)
    print(report)
    return int(not alike)
