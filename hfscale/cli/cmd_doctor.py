"""Check versions, devices, an 8-bit optimizer step, collectives between ranks, and whether the Accelerate config would
silently start one process only. With a recipe, also check the number of ranks, the effective batch size, whether the
layout fits the model, which parameters are trained, and the memory of a rank. Exits with 1 if there is a problem.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

from .doctor_checks import Finding
from .look import print_json

_WIDTH = 16  # of the column with the names of findings

HELP = "find problems before a run does: versions, devices, launch config, a recipe"
EXAMPLE = """hfscale doctor
hfscale doctor my_recipe.yaml parallel.tp_size=4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a YAML file, or a name that train --list shows"
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="recipe keys to override")
    parser.add_argument("--recipe-only", action="store_true", help="do not check this machine")


def run(arguments: argparse.Namespace) -> int:
    recipe = None
    if arguments.recipe is not None:
        from ..recipes import check_installed

        check_installed()
        from ..recipes.read import read_recipe

        recipe = read_recipe(arguments.recipe, arguments.overrides)
    findings: dict[str, list[Finding]] = {}
    for name, looks in _sections(arguments, recipe):
        findings[name] = []
        if not arguments.json:
            print(("\n" if len(findings) > 1 else "") + name, flush=True)
        for finding in looks:
            findings[name].append(finding)
            if not arguments.json:
                print(_line(finding), flush=True)
    problems = sum(
        finding.verdict == "problem" for finding in chain.from_iterable(findings.values())
    )
    if arguments.json:
        print_json(
            {name: [asdict(finding) for finding in looks] for name, looks in findings.items()}
        )
    else:
        print(f"\n{problems or 'no'} problem{'s' * (problems != 1)}")
    return int(problems > 0)


def _sections(
    arguments: argparse.Namespace, recipe: Any
) -> Iterator[tuple[str, Iterable[Finding]]]:
    """Yield groups of checks as (title, findings). A check runs only when its finding is requested from the
    iterator.
    """
    if not arguments.recipe_only:
        from .doctor_checks import this_machine as machine

        checks = (machine.eight_bit_step, machine.collectives, machine.accelerate_config)
        yield "versions", machine.versions()
        yield (
            "machine",
            chain(machine.devices(), (check() for check in checks), machine.environment()),
        )
    if recipe is not None:
        from .doctor_checks.recipe_check import examine

        yield f"recipe {recipe.name}", examine(recipe)


def _line(each: Finding) -> str:
    indent = " " * (_WIDTH + 11)
    return f"  {each.verdict:7}  {each.about:{_WIDTH}}  {each.text}".replace(
        "\n", f"\n  {indent}"
    ).rstrip()
