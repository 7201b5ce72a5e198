"""The command line of ``pretrain.py`` and ``finetune.py``."""

import argparse
from typing import TypeVar

from hfscale.cli.cmd_train import add_memory_limit
from hfscale.recipes.read import load_recipe
from hfscale.recipes.schema import Recipe

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def recipe_and_limit(schema: type[AnyRecipe], description: str) -> tuple[AnyRecipe, float | None]:
    """Parse ``--config FILE key=value ... --max-memory=GIB``; return recipe and limit, infinite without a number."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--config",
        required=True,
        help="a recipe: a path, or a name that hfscale train --list shows",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as training.steps=20"
    )
    add_memory_limit(parser)
    arguments = parser.parse_args()
    return load_recipe(schema, arguments.config, arguments.overrides), arguments.max_memory
