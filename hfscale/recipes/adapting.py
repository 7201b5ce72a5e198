"""Convert a recipe's adapter and quantization sections to configs of PEFT and transformers."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from transformers import BitsAndBytesConfig

from ..features.adapters.peft_config import config_class
from ..plan.quantized import AS_STORED
from .schema import FinetuneRecipe, RecipeError
from .tasks import task_of


def adapter_of(recipe: FinetuneRecipe) -> Any:
    """Return a PEFT config, or the path of a saved adapter; ``None`` where all parameters train."""
    if not recipe.adapter or "path" in recipe.adapter:
        return recipe.adapter.get("path")
    fields = {name: value for name, value in recipe.adapter.items() if name != "method"}
    kind, fixed = config_class(recipe.adapter["method"])
    return _made("adapter", kind, fields, {"task_type": task_of(recipe.data).adapter, **fixed})


def quantization_of(recipe: FinetuneRecipe) -> BitsAndBytesConfig | str | None:
    """Return the base's quantization config; ``None`` where it is not quantized, or read as plain values."""
    if recipe.quantization == {AS_STORED: True}:
        return AS_STORED
    return _made("quantization", BitsAndBytesConfig, recipe.quantization, {}) if recipe.quantization else None


def _made(section: str, kind: Callable[..., Any], fields: dict[str, Any], fixed: dict[str, Any]) -> Any:
    names = [name for name in inspect.signature(kind).parameters if name not in ("kwargs", *fixed)]
    unknown = [name for name in fields if name not in names]
    if unknown:
        close = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        name = getattr(kind, "__name__", "the config")
        raise RecipeError(f"{section}.{unknown[0]} is no field of {name}: {hint}valid are {', '.join(names)}")
    try:
        return kind(**fixed, **fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise RecipeError(f"{section}={fields} is refused by {kind.__name__}: {error}; change that field") from error
