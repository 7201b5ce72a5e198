"""Read a recipe: a YAML file and command-line overrides (``training.steps=20``), checked against the schema."""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ..errors import did_you_mean, meant
from . import LIBRARY
from .checks import check_values
from .schema import FinetuneRecipe, PretrainRecipe, Recipe, RecipeError

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def read_recipe(
    recipe: str | Path, overrides: Sequence[str] = ()
) -> PretrainRecipe | FinetuneRecipe:
    """Read a recipe from the path of a YAML file, or by the name of a recipe that hfscale ships; ``overrides`` such as
    ``training.steps=20`` replace its values.

    A recipe with the key ``base`` fine-tunes, a recipe with the key ``model`` pretrains.
    """
    path = locate(recipe)
    given = {
        *_content(path),
        *(text.partition("=")[0].partition(".")[0] for text in overrides),
    }
    if "base" in given and "model" in given:
        raise RecipeError(
            f"{path} has both base (a checkpoint to fine-tune) and model (sizes to pretrain): leave out model to "
            "fine-tune, or base to pretrain"
        )
    if "base" in given:
        return load_recipe(FinetuneRecipe, path, overrides)
    if "model" in given:
        return load_recipe(PretrainRecipe, path, overrides)
    raise RecipeError(
        f"{path} does not say what to train: add base (a checkpoint to fine-tune) or model (the sizes to pretrain)"
    )


def load_recipe(
    schema: type[AnyRecipe], path: str | Path, overrides: Sequence[str] = ()
) -> AnyRecipe:
    """Read a recipe of class ``schema`` from the path of a YAML file, or by the name of a recipe that hfscale ships;
    ``overrides`` such as ``"training.steps=20"`` replace its values.
    """
    path = locate(path)
    without_value = [text for text in overrides if "=" not in text]
    if without_value:
        raise RecipeError(
            f"{without_value[0]!r} is not an override: write key=value, for example training.steps=20"
        )
    content = _content(path)
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(schema), content, OmegaConf.from_cli(list(overrides))
        )
        recipe: AnyRecipe = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        raise RecipeError(
            f"{path} leaves out {error.full_key}, which has no default: add it"
        ) from error
    except OmegaConfBaseException as error:
        raise RecipeError(_explain(schema, str(path), error)) from error
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(
            f"{path} with {' '.join(overrides)} cannot be read as a recipe: {error}"
        ) from error
    check_values(recipe)
    return recipe


def shipped_recipes() -> dict[str, str]:
    """Map the names of shipped recipes to their descriptions, taken from the first lines of their files."""
    return {path.stem: _summary(path) for path in sorted(LIBRARY.glob("*.yaml"))}


def locate(recipe: str | Path) -> Path:
    """Return the path of a recipe's YAML file, given this path, or the name of a recipe that hfscale ships."""
    path = Path(recipe)
    if path.is_file():
        return path
    if path.suffix or len(path.parts) > 1:
        others = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml"))) or "no recipe"
        raise RecipeError(f"{recipe}: there is no such file; {path.parent} has {others}")
    names = [p.stem for p in LIBRARY.glob("*.yaml")]
    if path.name not in names:
        close = meant(path.name, names)
        hint = f"did you mean {close}? " if close else ""
        raise RecipeError(
            f"{recipe} is neither a file nor a recipe that comes with hfscale: {hint}"
            f"give the path of a YAML file, or one of {', '.join(sorted(names))}"
        )
    return LIBRARY / f"{path.name}.yaml"


def _summary(path: Path) -> str:
    lines = takewhile(
        lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()
    )
    text = " ".join(line.removeprefix("#").strip() for line in lines)
    return re.split(r"[.:;](?:\s|$)", text, maxsplit=1)[0]


def _content(path: Path) -> DictConfig:
    try:
        content = OmegaConf.load(path)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise RecipeError(f"{path} cannot be read as a recipe: {error}") from error
    if not isinstance(content, DictConfig):
        raise RecipeError(
            f"{path} cannot be read as a recipe: it has no keys; write keys with values, such as name: first"
        )
    return content


def _explain(schema: type, path: str, error: OmegaConfBaseException) -> str:
    key = error.full_key or str(error.key)
    section = error.object_type if is_dataclass(error.object_type) else schema
    valid = [item.name for item in fields(section)]
    name = key.rpartition(".")[2]
    if name in valid:
        return f"{key} in {path} or on the command line has an impossible value: {str(error).splitlines()[0]}"
    hint = did_you_mean(name, valid)
    return f"{key} in {path} or on the command line is not a key of a recipe: {hint}valid here are {', '.join(valid)}"
