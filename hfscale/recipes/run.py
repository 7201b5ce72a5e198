"""Run a recipe from its model or base to its results."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoConfig, BitsAndBytesConfig, PreTrainedConfig

import hfscale

from .._compat.transformers.classes import made_or_explained
from ..errors import did_you_mean
from ..features.adapters.storage import config_class
from ..plan.quantized import AS_STORED
from ..train.guards import check_packed_rows
from .dataset import END_OF_TEXT_ID, prepare
from .launch import layout_of
from .main_process import is_main
from .memory_limit import expect_memory
from .pictures import answers, samples
from .places import check_places
from .results import finish
from .schema import FinetuneRecipe, PretrainRecipe, Recipe, RecipeError
from .tasks import model_options, task_of
from .trainer import RecipeTrainer

AnyRecipe = PretrainRecipe | FinetuneRecipe


def start(recipe: AnyRecipe, limit: float | None = None) -> None:
    """Run a recipe in the only process, or as a rank of a launcher's; ``limit`` is the most GiB that one rank may be
    predicted to need, and ``None`` makes no estimate.
    """
    try:
        carry_out(recipe, limit)
    finally:
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()


def carry_out(recipe: AnyRecipe, limit: float | None = None) -> None:
    """Pretrain or fine-tune as the recipe says; call it on every rank; ``limit``: as for :func:`start`."""
    layout = layout_of(recipe)
    check_places(recipe)
    model, tokenizer = load(recipe, layout)
    if isinstance(recipe, FinetuneRecipe) and recipe.adapter and is_main():
        print(hfscale.coverage_report(model), flush=True)
    expected = expect_memory(model, recipe, limit)
    if recipe.data.is_packed and tokenizer is not None:
        check_packed_rows(model, tokens=recipe.data.sequence_length)
    vocabulary = 0 if isinstance(recipe, FinetuneRecipe) else recipe.model.vocab_size
    tokenizer, data, validation, baseline = prepare(recipe.data, tokenizer, vocabulary, recipe.directory)
    trainer = RecipeTrainer(model, recipe, data, validation, tokenizer, baseline)
    asked = recipe.data.samples
    before = answers(model, tokenizer, validation, asked)
    outcome = trainer.fit()
    after = answers(model, tokenizer, validation, asked)
    shown = samples(tokenizer, validation, before, after)
    finish(trainer, tokenizer, recipe, layout, outcome, len(data), expected, shown)


def options_of(recipe: Recipe) -> dict[str, Any]:
    """Return the model options in a recipe, other than the layout."""
    precision = recipe.training.mixed_precision
    weight = recipe.training.mtp_loss_weight
    return {"mixed_precision": precision, "mtp_loss_weight": weight, **recipe.sections(precision)}


def load(recipe: AnyRecipe, layout: hfscale.ParallelConfig) -> tuple[Any, Any]:
    """Return the sharded model, of random weights or from a checkpoint, and its tokenizer or processor, if any."""
    built: dict[str, Any] = {"parallel": layout, "seed": recipe.seed, **options_of(recipe)}
    built["use_liger_kernel"], built["compile"] = recipe.training.use_liger_kernel, recipe.training.compile
    if isinstance(recipe, PretrainRecipe):
        return hfscale.from_config(config_of(recipe), **built), None
    if (quantization := quantization_of(recipe)) is not None:
        built["quantization_config"] = quantization
    try:
        task = task_of(recipe.data)
        tokenizer = task.reader.from_pretrained(recipe.base)
        inner = getattr(tokenizer, "tokenizer", tokenizer)
        if (task.loss is not None or inner is not tokenizer) and inner.pad_token_id is None:
            inner.pad_token = inner.eos_token  # behind whole texts, whose end a decoder finds by it
        model = hfscale.from_pretrained(
            recipe.base,
            peft_config=adapter_of(recipe),
            dtype=recipe.training.dtype,
            **built,
            **model_options(recipe.data, inner.pad_token_id),
        )
        return model, tokenizer
    except (OSError, ImportError) as error:
        raise RecipeError(f"base={recipe.base!r} cannot be loaded: {error}") from error


def config_of(recipe: PretrainRecipe) -> PreTrainedConfig:
    """Return the config of the model to start."""
    family, fields = recipe.model.family, {**vars(recipe.model), **recipe.model.options}
    if family not in CONFIG_MAPPING:
        raise RecipeError(f"model.family={family!r} is no model_type of transformers: use llama, qwen3_moe, ...")
    known = AutoConfig.for_model(family)
    unknown = [name for name in recipe.model.options if not hasattr(known, name)]
    if unknown:
        raise RecipeError(f"model.options: {family} has no {', '.join(unknown)}: use fields of {type(known).__name__}")
    with made_or_explained("model of the recipe"):
        config = AutoConfig.for_model(
            family,
            **{name: value for name, value in fields.items() if name not in ("family", "options")},
            max_position_embeddings=2 * recipe.data.sequence_length,
            bos_token_id=None,
            eos_token_id=END_OF_TEXT_ID,
            pad_token_id=END_OF_TEXT_ID,
        )
    return config


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
        hint = did_you_mean(unknown[0], names)
        name = getattr(kind, "__name__", "the config")
        raise RecipeError(f"{section}.{unknown[0]} is no field of {name}: {hint}valid are {', '.join(names)}")
    try:
        return kind(**fixed, **fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise RecipeError(f"{section}={fields} is refused by {kind.__name__}: {error}; change that field") from error
