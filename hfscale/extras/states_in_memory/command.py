"""Run a recipe under torch's elastic agent, once undisturbed and once with ranks killed in steps, saves and loads, or
stopped for a while. Prints seconds from each kill to the next step, steps lost and effective time. Exits with 1 if the
end differs in a bit. Results go to runs/<name>-drill-plain and runs/<name>-drill, replaced.
"""

import argparse

from ...cli.look import working
from ...recipes import check_installed

HELP = "rehearse failures: kill and stop ranks of a recipe's run at random, and compare its end"
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
        "overrides", metavar="key=value", nargs="*", help="recipe keys, as training.steps=20"
    )
    parser.add_argument(
        "--kills", type=int, default=5, metavar="N", help="how often to strike (default: 5)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of kinds, ranks and moments (default: 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    check_installed()
    from .drill import drill

    working("running the recipe, undisturbed and disturbed")
    report, alike = drill(arguments.recipe, arguments.overrides, arguments.kills, arguments.seed)
    print(report)
    return int(not alike)
