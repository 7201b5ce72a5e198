"""Train a recipe, a YAML file: `model:` pretrains from random weights, `base:` fine-tunes a checkpoint. Starts
accelerate launch with as many processes on this machine as the recipe's layout needs; started by a launcher, it runs as
one of the launched processes. Results go to runs/<name>.
"""

import argparse
import math
import shlex

from ..config.memory import byte_count
from ..recipes import check_installed
from .look import show

HELP = "train a recipe: pretraining, fine-tuning or adapters, in any layout"
JSON = False
EXAMPLE = """hfscale train demo_pretrain
hfscale train demo_lora training.steps=20 parallel.tp_size=1 parallel.dp_shard_size=2
hfscale train my_recipe.yaml --print-launch
hfscale train my_recipe.yaml --print-job slurm > job.sh"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a YAML file, or a name that --list shows"
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="recipe keys to override, such as training.steps=20",
    )
    add_memory_limit(parser)
    parser.add_argument(
        "--print-launch",
        action="store_true",
        help="print the launch command (for Slurm and the like)",
    )
    parser.add_argument(
        "--print-job", choices=("slurm", "kubernetes"), help="print a job file for a cluster"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="N",
        help="GPUs per node of the cluster (default: 8)",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the recipes that come with hfscale"
    )
    parser.add_argument("--json", action="store_true", help="with --list, print JSON")


def run(arguments: argparse.Namespace) -> int:
    check_installed()
    from ..recipes.launch import is_launched, launch, launch_options
    from ..recipes.read import read_recipe, shipped_recipes
    from ..recipes.schema import RecipeError

    if arguments.list:
        shipped = shipped_recipes()
        width = max(map(len, shipped))
        show(
            arguments,
            shipped,
            "\n".join(f"{name:<{width}}  {text}" for name, text in shipped.items()),
        )
        return 0
    if arguments.recipe is None:
        raise RecipeError(
            "RECIPE is missing: give the path of a YAML file, or a name that hfscale train --list shows"
        )
    if is_launched():
        from ..recipes.main_process import run as run_or_explain
        from ..recipes.run import start

        run_or_explain(
            lambda: start(read_recipe(arguments.recipe, arguments.overrides), arguments.max_memory)
        )
        return 0
    recipe = read_recipe(arguments.recipe, arguments.overrides)
    from ..config.parallel import ParallelConfig
    from ..recipes.places import check_places  # after the recipe is read: these import torch

    check_places(recipe)

    processes = ParallelConfig(**recipe.parallel).total_size
    again = [arguments.recipe, *arguments.overrides, *memory_limit_flags(arguments.max_memory)]
    if arguments.print_job:
        from ..recipes.launch import job_file

        print(
            job_file(arguments.print_job, recipe.name, processes, arguments.gpus_per_node, again),
            end="",
        )
        return 0
    if arguments.print_launch:
        print(shlex.join(["accelerate", "launch", *launch_options(processes, again)]))
        return 0
    if processes > 1:
        return launch(processes, again)
    from ..recipes.run import start

    start(recipe, arguments.max_memory)
    return 0


def add_memory_limit(parser: argparse.ArgumentParser) -> None:
    """Add the flag ``--max-memory[=SIZE]``, a limit of each rank's memory; without a size, the memory is only
    printed.
    """
    parser.add_argument(
        "--max-memory",
        nargs="?",
        const=math.inf,
        type=_gibibytes,
        metavar="SIZE",
        help="print the memory each rank needs; with a size (40GiB, 40 or 40GB), stop before training if it is more",
    )


def memory_limit_flags(limit: float | None) -> list[str]:
    """Return ``limit``, a value of ``--max-memory`` in GiB, as a flag for the command line of a launched process; an
    empty list if there is no limit.
    """
    if limit is None:
        return []
    # Enough digits for a size that was given in units of 10^9 bytes.
    return ["--max-memory"] if math.isinf(limit) else [f"--max-memory={limit:.12g}"]


def _gibibytes(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        count = byte_count(text)
    if not count:
        # If the flag stands right before an override, argparse takes the override for the flag's size.
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size for --max-memory: write --max-memory=40GiB, or --max-memory=40, which means the "
            "same, or put --max-memory without a size at the end of the command"
        )
    return count / 2**30
