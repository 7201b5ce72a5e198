"""Check the values of a recipe when it is read, and raise an error for invalid ones."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import hfscale

from ..errors import did_you_mean
from .schema import DTYPES, FORMATS, METHODS, DataRecipe, FinetuneRecipe, Recipe, RecipeError

STEPS_BEFORE_PROFILE = 2
"""Steps that are never profiled: the first step creates buffers and kernels, the second one warms up the profiler."""


def check_values(recipe: Recipe) -> None:
    """Raise :class:`RecipeError` if a value of the recipe, or a combination of values, is invalid."""
    data = recipe.data
    training = recipe.training
    for section in (
        "data",
        "training",
        *(["teacher"] if isinstance(recipe, FinetuneRecipe) else []),
    ):
        _check_declared(section, getattr(recipe, section))
    recipe.sections(training.mixed_precision)
    _check_format(recipe, data)
    _check_weights(recipe)
    if not 0 < data.validation_fraction < 1:
        raise RecipeError(
            f"data.validation_fraction={data.validation_fraction} leaves nothing to validate or to train on: use a "
            "fraction of the documents between 0 and 1"
        )
    if not 0 <= training.warmup_ratio < 1:
        raise RecipeError(
            f"training.warmup_ratio={training.warmup_ratio} is invalid: use at least 0 and below 1"
        )
    if training.restarts and not training.resume:
        raise RecipeError(
            f"training.restarts={training.restarts} starts a failed run again, but without training.resume=true the "
            "new start would be refused: add training.resume=true, or leave training.restarts out"
        )
    if recipe.memory.get("offload_optimizer"):
        from ..plan.feature_plans import refuse_aside  # which imports torch

        refuse_aside(training.optimizer)
    if recipe.profile:
        steps_to_profile(recipe.profile, training.steps)


def made_of(
    section: str,
    kind: Callable[..., Any],
    given: dict[str, Any],
    fixed: dict[str, Any],
) -> Any:
    """Call ``kind(**fixed, **given)`` and return the result, for a config class such as PEFT's ``LoraConfig``.
    ``given`` holds the fields that the recipe's ``section`` sets, ``fixed`` those that hfscale sets.

    Raises:
        RecipeError: the recipe sets a field that the class does not have, or a value that the class refuses.
    """
    names = [name for name in inspect.signature(kind).parameters if name not in ("kwargs", *fixed)]
    unknown = [name for name in given if name not in names]
    if unknown:
        hint = did_you_mean(unknown[0], names)
        name = getattr(kind, "__name__", "the config")
        raise RecipeError(
            f"{section}.{unknown[0]} is no field of {name}: {hint}valid are {', '.join(names)}"
        )
    try:
        return kind(**fixed, **given)
    except (ValueError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"{section}={given} is refused by {kind.__name__}: {error}; change that field"
        ) from error


def _check_declared(section: str, values: Any) -> None:
    for option in fields(values):
        name = f"{section}.{option.name}"
        value = getattr(values, option.name)
        asked = option.metadata
        if value is None:
            continue
        if "choices" in asked and value not in asked["choices"]:
            raise RecipeError(f"{name}={value!r} is not known: use {' or '.join(asked['choices'])}")
        if "least" in asked and value < asked["least"]:
            raise RecipeError(
                f"{name}={value} is invalid: use a whole number of at least {asked['least']}"
            )
        if "above" in asked and not value > asked["above"]:
            raise RecipeError(f"{name}={value} is invalid: use more than {asked['above']:g}")


def steps_to_profile(asked: str, steps: int) -> int:
    """Return the number of steps to profile that the recipe's option ``profile`` asks for: ``"3 steps"`` -> 3. Raise
    :class:`RecipeError` if ``asked`` is not a number of steps, or more than a run of ``steps`` steps can profile.
    """
    match = re.fullmatch(r"\s*(\d+)(?:\s+steps?)?\s*", asked)
    if match is None or int(match[1]) < 1:
        raise RecipeError(f"profile={asked!r} is not a number of steps: write profile: 3 steps")
    most = max(steps - STEPS_BEFORE_PROFILE, 0)
    if int(match[1]) > most:
        raise RecipeError(
            f"profile={asked!r} starts after the first {STEPS_BEFORE_PROFILE} steps, but training.steps={steps}: use "
            f"at most {most}, or more training.steps"
        )
    return int(match[1])


def _check_format(recipe: Recipe, data: DataRecipe) -> None:
    formats = {"stdlib": ("text",), "stdlib-docs": ("chat", "completion", "pairs", "prompts")}
    if data.format not in formats.get(data.source, FORMATS):
        fitting = "text" if data.source == "stdlib" else "chat, completion, pairs or prompts"
        raise RecipeError(
            f"data.source={data.source} cannot be read with data.format={data.format}: use data.format {fitting}"
        )
    if data.chat_template is not None and data.format not in ("chat", "pairs"):
        raise RecipeError(
            f"data.chat_template={data.chat_template!r} has no use with data.format={data.format}: leave it out, or "
            "use data.format=chat"
        )
    if data.images_column is not None and (data.format != "chat" or data.packing):
        raise RecipeError(
            f"data.images_column={data.images_column!r} needs conversations, one per row: use data.format=chat, and "
            "leave out data.packing"
        )
    fields = (recipe.parallel, *recipe.fallbacks)
    if data.samples and (
        data.format in ("pairs", "classes")
        or any(hfscale.ParallelConfig(**each).pp > 1 for each in fields)
    ):
        raise RecipeError(
            f"data.samples={data.samples} needs a model that generates text, and a layout without pipeline stages: set "
            "data.samples=0"
        )
    if data.packing and data.format in ("pairs", "classes"):
        raise RecipeError(
            f"data.packing=true cannot be used with data.format={data.format}, for which every text needs its own "
            "row: leave out data.packing"
        )
    if (data.format == "classes") != bool(data.classes):
        raise RecipeError(
            f"data.format={data.format} with data.classes={data.classes}: data.classes and data.format=classes need "
            "each other (data.format=classes data.classes=[negative,positive])"
        )


def _check_learning(recipe: FinetuneRecipe) -> None:
    teacher = recipe.teacher
    data = recipe.data
    if recipe.rewards and recipe.distils:
        raise RecipeError(
            "a recipe can learn either from rewards or from a teacher (teacher.base or teacher.stored), got both: "
            "leave one of them out"
        )
    if teacher.write and (teacher.stored or not teacher.base):
        raise RecipeError(
            "teacher.write stores the predictions of the model teacher.base: give teacher.base, and no teacher.stored"
        )
    if teacher.stored and recipe.trl:
        raise RecipeError(
            "teacher.stored has predictions for the texts of the data, not for generated ones: leave trl out"
        )
    if recipe.trl and not (recipe.rewards or teacher.base):
        raise RecipeError(
            "trl sets how the model generates texts, but without rewards and teacher.base no text is generated: give "
            "one of them, or leave trl out"
        )
    _check_texts(recipe, data)


def _check_texts(recipe: FinetuneRecipe, data: DataRecipe) -> None:
    """Raise :class:`RecipeError` if a model is to generate texts but the data format has no prompts, or if a teacher is
    given but the data format has no texts that it can predict.
    """
    fitting = (
        ("chat", "completion", "prompts") if recipe.generates else ("text", "chat", "completion")
    )
    purpose = "generate from" if recipe.generates else "learn from a teacher"
    if (recipe.generates or recipe.distils) and data.images_column is not None:
        raise RecipeError(
            f"data must be texts without pictures to {purpose}, got data.images_column={data.images_column!r}: leave "
            "it out"
        )
    if (recipe.generates or recipe.distils) and data.format not in fitting:
        raise RecipeError(
            f"data.format must be {' or '.join(fitting)} to {purpose}, got {data.format}: use one of them"
        )
    if data.format == "prompts" and not recipe.generates:
        raise RecipeError(
            "data.format=prompts has no texts to train on, only prompts for the model to generate from: give rewards"
        )
    if recipe.generates and (data.samples or data.packing or recipe.training.balanced_batches):
        raise RecipeError(
            "data.samples, data.packing and training.balanced_batches need texts that exist before training, which "
            "the model generates here: leave them out with rewards or trl"
        )


def _check_weights(recipe: Recipe) -> None:
    adapter = recipe.adapter if isinstance(recipe, FinetuneRecipe) else {}
    if isinstance(recipe, FinetuneRecipe):
        _check_adapter(adapter)
        if recipe.quantization and not adapter:
            raise RecipeError(
                f"quantization={recipe.quantization} without an adapter: weights in 4 or 8 bits cannot be trained; add "
                "one (adapter.method=lora adapter.target_modules=all-linear), or leave out quantization"
            )
        _check_merge(recipe)
        _check_learning(recipe)
    dtype = recipe.training.dtype
    if dtype != "float32" and not adapter and not recipe.training.stochastic_rounding:
        raise RecipeError(
            f"training.dtype={dtype} without an adapter: updates smaller than about 1/512 of a bfloat16 weight would "
            "be lost; use training.dtype=float32 training.mixed_precision=bf16, which computes in bfloat16, or "
            "training.stochastic_rounding=true"
        )


def _check_adapter(adapter: dict[str, Any]) -> None:
    if "path" in adapter and len(adapter) > 1:
        others = ", ".join(f"adapter.{name}" for name in adapter if name != "path")
        raise RecipeError(
            f"adapter.path={adapter['path']!r} continues a saved adapter, which has its own config: leave out {others}"
        )
    if adapter and "path" not in adapter and adapter.get("method") not in METHODS:
        raise RecipeError(
            f"adapter.method={adapter.get('method')!r} is not known: use {', '.join(METHODS)}, or adapter.path of a "
            "saved adapter alone"
        )


def _check_merge(recipe: FinetuneRecipe) -> None:
    if recipe.merge not in (False, True, *DTYPES):
        raise RecipeError(
            f"merge={recipe.merge!r} is not known: use false, true or a dtype: {', '.join(DTYPES)}"
        )
    if recipe.merge and not recipe.adapter:
        raise RecipeError(
            f"merge={recipe.merge} without an adapter: there is nothing to merge; leave it out"
        )
    if recipe.merge is True and recipe.quantization:
        raise RecipeError(
            "merge=true over a quantized base does not say what dtype its weights are dequantized into: use "
            "merge=bfloat16 "
            f"or another of {', '.join(DTYPES)}"
        )
    if isinstance(recipe.merge, str) and not recipe.quantization:
        raise RecipeError(
            f"merge={recipe.merge} names a dtype, but the base is not quantized: use merge=true, which merges into the "
            f"base's own dtype ({recipe.training.dtype})"
        )
