"""What a recipe says of adapters and quantization, as the configs of PEFT and transformers."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import BitsAndBytesConfig

from ..features.adapters.peft_config import config_class
from .schema import FinetuneRecipe, RecipeError
from .tasks import task_of


def adapter_of(recipe: FinetuneRecipe) -> Any:
    """Return a PEFT config, or the path of a saved adapter; ``None`` where all parameters train.

    Raises:
        RecipeError: a field is none of the method's config, or PEFT refuses its value.
    """
    if not recipe.adapter or "path" in recipe.adapter:
        return recipe.adapter.get("path")
    fields = {name: value for name, value in recipe.adapter.items() if name != "method"}
    kind, fixed = config_class(recipe.adapter["method"])
    return _made("adapter", kind, fields, {"task_type": task_of(recipe.data).adapter, **fixed})


def quantization_of(recipe: FinetuneRecipe) -> BitsAndBytesConfig | None:
    """Return the base's quantization config; ``None`` where it is not quantized.

    Raises:
        RecipeError: a field is none of ``BitsAndBytesConfig``, or it refuses its value.
    """
    return _made("quantization", BitsAndBytesConfig, recipe.quantization, {}) if recipe.quantization else None


def describe_adapter(recipe: FinetuneRecipe, coverage: str) -> list[str]:
    """Return Markdown lines for the card: the adapter, its base, and the parameters that it covers."""
    quantization = _listed(recipe.quantization)
    base = f"the base was quantized ({quantization})" if quantization else f"the base was in {recipe.training.dtype}"
    path = recipe.adapter.get("path")
    method = "a saved one, trained further" if path else recipe.adapter["method"]
    fields = _listed({name: value for name, value in recipe.adapter.items() if name not in ("method", "path")})
    first = f"- adapter: {method}{f' ({fields})' if fields else ''}; {base}"
    return [first, *(f"- {line}" for line in coverage.splitlines())]


def describe_loading(recipe: FinetuneRecipe, base: str) -> str:
    """Return the card's code that puts the adapter around its base by PEFT."""
    values = "".join(f", {name}={value!r}" for name, value in recipe.quantization.items())
    quantized = f",\n    quantization_config=BitsAndBytesConfig({values.removeprefix(', ')})" if values else ""
    also = ", BitsAndBytesConfig" if values else ""
    task, head = task_of(recipe.data), ""
    kind, reader = task.class_name, task.reader.__name__
    name = reader.removeprefix("Auto").lower()
    if recipe.data.format in ("pairs", "classes"):
        head = f", num_labels={len(recipe.data.classes) or 1}, pad_token_id=tokenizer.pad_token_id"
    return f"""```python
from peft import PeftModel
from transformers import {kind}, {reader}{also}

{name} = {reader}.from_pretrained("path/of/this/directory")
base = {kind}.from_pretrained(
    "{base}", dtype="{recipe.training.dtype}"{head}{quantized}
)
model = PeftModel.from_pretrained(base, "path/of/this/directory")
```

It is an ordinary adapter of PEFT over `{base}`; hfscale need not be installed."""


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


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
