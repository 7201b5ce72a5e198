"""``hfscale doctor``: what a run would stumble over."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from .look import add_json, print_json, working

if TYPE_CHECKING:
    from ..doctor.finding import Finding

HELP = "look for what a run would stumble over: versions, devices, launch config, a recipe"
DESCRIPTION = (
    "Check versions, devices, an 8-bit step, ranks that really talk, and an Accelerate config that would start one "
    "process silently; of a recipe, ranks, distinct batches, effective batch, problems of its plan, what trains, and "
    "the memory of a rank. Exits with 1 where there is a problem."
)
EXAMPLE = """hfscale doctor
hfscale doctor my_recipe.yaml parallel.tp_size=4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``hfscale doctor``."""
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a YAML file, or a name that train --list shows")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="on top of the recipe")
    parser.add_argument("--recipe-only", action="store_true", help="leave this machine out")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Look, and say what was found."""
    recipe = None
    if arguments.recipe is not None:
        from ..recipes import check_installed

        check_installed()
        from ..recipes.read import read_recipe

        recipe = read_recipe(arguments.recipe, arguments.overrides)
    sections: dict[str, list[Finding]] = {}
    if not arguments.recipe_only:
        working("trying this machine")
        from ..doctor import machine

        sections["versions"] = machine.versions()
        sections["machine"] = [
            *machine.devices(),
            machine.eight_bit_step(),
            machine.collectives(),
            machine.accelerate_config(),
            *machine.environment(),
        ]
    if recipe is not None:
        from ..doctor.recipe import examine

        sections[f"recipe {recipe.name}"] = examine(recipe)
    problems = sum(each.verdict == "problem" for found in sections.values() for each in found)
    if arguments.json:
        print_json({name: [asdict(each) for each in found] for name, found in sections.items()})
    else:
        print("\n\n".join(_section(name, found) for name, found in sections.items()))
        print(f"\n{problems or 'no'} problem{'s' * (problems != 1)}")
    return int(problems > 0)


def _section(name: str, found: list["Finding"]) -> str:
    width = max((len(each.about) for each in found), default=0)
    indent = " " * (width + 11)
    lines = [f"{each.verdict:7}  {each.about:{width}}  " + each.text.replace("\n", f"\n{indent}") for each in found]
    return "\n".join([name, *(f"  {line}".rstrip() for line in lines)])
