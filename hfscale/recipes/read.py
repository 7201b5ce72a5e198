"""Read a recipe: a YAML file with command-line overrides (``training.steps=20``), checked against its schema."""

import argparse
import difflib
import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from .schema import Recipe, RecipeError, check_values

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def recipe_and_limit(schema: type[AnyRecipe], description: str) -> tuple[AnyRecipe, float | None]:
    """Read ``--config FILE key=value ... --max-memory=GIB``; the second is infinite without a number."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="a recipe, such as those in scripts/recipes")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as training.steps=20")
    parser.add_argument(
        "--max-memory",
        nargs="?",
        const=math.inf,
        type=_gibibytes,
        metavar="GIB",
        help="say what memory each rank needs; with a number, stop before training where it is more",
    )
    arguments = parser.parse_args()
    return load_recipe(schema, arguments.config, arguments.overrides), arguments.max_memory


def _gibibytes(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Where the flag stands before an override, the parser takes that for its number.
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of GiB: write --max-memory=40, or --max-memory alone behind everything else"
        ) from None


def load_recipe(schema: type[AnyRecipe], path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """The recipe in the file at ``path``, with ``overrides`` (``"training.steps=20"``) on top.

    Raises:
        RecipeError: no such file, a misspelt key, a value of the wrong type or out of range, a key left out.
    """
    if not Path(path).is_file():
        found = ", ".join(sorted(p.name for p in Path(path).parent.glob("*.yaml"))) or "no recipe"
        raise RecipeError(f"--config {path}: there is no such file; {Path(path).parent} has {found}")
    without_value = [text for text in overrides if "=" not in text]
    if without_value:
        raise RecipeError(f"{without_value[0]!r} is not an override: write key=value, such as training.steps=20")
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(schema), OmegaConf.load(path), OmegaConf.from_cli(list(overrides))
        )
        recipe: AnyRecipe = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        raise RecipeError(f"{path} leaves out {error.full_key}, which has no default: add it") from error
    except OmegaConfBaseException as error:
        raise RecipeError(_explain(schema, str(path), error)) from error
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read as a recipe: {error}") from error
    check_values(recipe)
    return recipe


def _explain(schema: type, path: str, error: OmegaConfBaseException) -> str:
    key = error.full_key or str(error.key)
    section = error.object_type if is_dataclass(error.object_type) else schema
    valid = [item.name for item in fields(section)]
    name = key.rpartition(".")[2]
    if name in valid:
        return f"{key} in {path} or on the command line has an impossible value: {str(error).splitlines()[0]}"
    close = difflib.get_close_matches(name, valid, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{key} in {path} or on the command line is not a key of a recipe: {hint}valid here are {', '.join(valid)}"
