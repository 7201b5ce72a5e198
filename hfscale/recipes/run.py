"""Run a recipe: load or build the model, prepare the data, train, and write the results."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoConfig, BitsAndBytesConfig, PreTrainedConfig

import hfscale

from .._compat.transformers.classes import made_or_explained
from ..config.options import Options
from ..extensions import added
from ..features.adapters.storage import config_class
from ..train.packed_rows.guard import check_packed_rows
from .batch_sizes import expect_memory, per_rank
from .checks import made_of
from .dataset import END_OF_TEXT_ID, prepare
from .generating import train_on_generations
from .launch import layout_of
from .main_process import is_main
from .pictures import answers, samples
from .places import check_places
from .results import finish
from .rows import RowBatches
from .schema import FinetuneRecipe, PretrainRecipe, Recipe, RecipeError, TeacherRecipe
from .tasks import model_options, task_of
from .trainer import RecipeTrainer, rows_of

AnyRecipe = PretrainRecipe | FinetuneRecipe


def start(recipe: AnyRecipe, limit: float | None = None) -> None:
    """Run a recipe in this process, which is the only one or one rank of several. If a rank is predicted to need more
    than ``limit`` GiB of memory, raise :class:`RecipeError`.
    """
    if recipe.training.restarts:
        hfscale.restart_in_place(recipe.training.restarts)
    try:
        carry_out(recipe, limit)
    finally:
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()


def carry_out(recipe: AnyRecipe, limit: float | None = None) -> None:
    """Pretrain or fine-tune according to the recipe; call it on every rank. If a rank is predicted to need more than
    ``limit`` GiB of memory, raise :class:`RecipeError` before training.
    """
    layout = layout_of(recipe)
    check_places(recipe)
    if isinstance(recipe, FinetuneRecipe) and recipe.teacher.write:
        write_teacher(recipe, layout)
        return
    model, tokenizer = load(recipe, layout)
    if isinstance(recipe, FinetuneRecipe) and recipe.adapter and is_main():
        print(hfscale.coverage_report(model), flush=True)
    expected = expect_memory(model, recipe, limit)
    if recipe.data.is_packed and tokenizer is not None:
        check_packed_rows(model, tokens=recipe.data.sequence_length)
    if isinstance(recipe, FinetuneRecipe) and recipe.generates:
        its = {"teacher_model": teacher_model(recipe, layout)} if recipe.distils else {}
        train_on_generations(model, tokenizer, recipe, layout, its)
        return
    vocabulary = 0 if isinstance(recipe, FinetuneRecipe) else recipe.model.vocab_size
    tokenizer, data, validation, baseline = prepare(
        recipe.data, tokenizer, vocabulary, recipe.directory
    )
    teacher: Any = None
    if isinstance(recipe, FinetuneRecipe) and recipe.teacher.stored:
        teacher = hfscale.Teacher.stored(recipe.teacher.stored, model, beta=recipe.teacher.beta)
    elif isinstance(recipe, FinetuneRecipe) and recipe.distils:
        asked = {"beta": recipe.teacher.beta, "temperature": recipe.teacher.temperature}
        teacher = hfscale.Teacher(teacher_model(recipe, layout), model, **asked)
    trainer = RecipeTrainer(model, recipe, data, validation, tokenizer, baseline, teacher)
    before = answers(model, tokenizer, validation, recipe.data.samples)
    outcome = trainer.fit()
    after = answers(model, tokenizer, validation, recipe.data.samples)
    shown = samples(tokenizer, validation, before, after)
    finish(trainer, tokenizer, recipe, layout, outcome, len(data), expected, shown)


def write_teacher(recipe: FinetuneRecipe, layout: hfscale.ParallelConfig) -> None:
    """Store a teacher's most probable tokens at every position of the training and validation rows; call it on every
    rank.
    """
    model = teacher_model(recipe, layout)
    tokenizer = reader_of(recipe)
    _, *data, _ = prepare(
        recipe.data,
        tokenizer,
        0,
        Path(recipe.teacher.write),
    )
    _, size = per_rank(
        recipe.training.batch_size, layout.batch_world, recipe.training.microbatch_size
    )
    batches = RowBatches([rows_of(recipe, batch, model, tokenizer) for batch in data], size)
    asked = recipe.teacher
    hfscale.Teacher.write(
        model, batches, asked.write, top_k=asked.top_k, temperature=asked.temperature
    )
    if is_main():
        print(
            f"{asked.write} has the {asked.top_k} most probable tokens at every position",
            flush=True,
        )


def teacher_model(recipe: FinetuneRecipe, layout: hfscale.ParallelConfig) -> Any:
    """Load the teacher model of a distillation, in its own layout ``teacher.parallel``, or in the student's ``layout``
    if the recipe sets none.
    """
    asked = recipe.teacher
    own = hfscale.ParallelConfig(**asked.parallel) if asked.parallel else layout
    given: dict[str, Any] = {
        "parallel": own,
        "dtype": asked.dtype,
        "quantization_config": quantization_of(asked),
    }
    try:
        return hfscale.from_pretrained(asked.base, **given).eval()
    except (OSError, ImportError) as error:
        raise RecipeError(
            f"teacher.base={asked.base!r} cannot be loaded: {error}; give the directory of a checkpoint or the id of "
            "a model on the Hub"
        ) from error


def options_of(recipe: Recipe) -> dict[str, Any]:
    """Return the keyword arguments of ``hfscale.from_pretrained`` and ``from_config`` that a recipe sets, such as
    ``compile`` and ``memory``, without the layout.
    """
    training = recipe.training
    names = [field.name for field in fields(Options) if hasattr(training, field.name)]
    options = {name: getattr(training, name) for name in names}
    return options | recipe.sections(training.mixed_precision)


def load(recipe: AnyRecipe, layout: hfscale.ParallelConfig) -> tuple[Any, Any]:
    """Build the sharded model of a recipe, and load its tokenizer or processor. A model to pretrain gets random
    weights, and ``None`` as its tokenizer.
    """
    built: dict[str, Any] = {
        "parallel": layout,
        "seed": recipe.seed,
        **options_of(recipe),
    }
    if isinstance(recipe, PretrainRecipe):
        return hfscale.from_config(config_of(recipe), **built), None
    if (quantization := quantization_of(recipe)) is not None:
        built["quantization_config"] = quantization
    try:
        tokenizer = reader_of(recipe)
        inner = getattr(tokenizer, "tokenizer", tokenizer)
        model = hfscale.from_pretrained(
            recipe.base,
            peft_config=adapter_of(recipe),
            dtype=recipe.training.dtype,
            **built,
            **model_options(recipe.data, inner.pad_token_id),
        )
        return model, tokenizer
    except (OSError, ImportError) as error:
        raise RecipeError(
            f"base={recipe.base!r} cannot be loaded: {error}; give the directory of a checkpoint or the id of a model "
            "on the Hub"
        ) from error


def reader_of(recipe: FinetuneRecipe) -> Any:
    """Load the tokenizer or processor of the base model. If the task needs padding and there is no padding token, the
    end-of-text token becomes the padding token.
    """
    task = task_of(recipe.data)
    reader = task.reader.from_pretrained(recipe.base)
    inner = getattr(reader, "tokenizer", reader)
    if (task.loss is not None or inner is not reader) and inner.pad_token_id is None:
        inner.pad_token = inner.eos_token  # marks the end of a text for a model that scores texts
    return reader


def config_of(recipe: PretrainRecipe) -> PreTrainedConfig:
    """Build the config of the model to pretrain from the recipe's ``model`` section; raise :class:`RecipeError` for
    unknown fields.
    """
    family = recipe.model.family
    fields = {**vars(recipe.model), **recipe.model.options}
    if family not in CONFIG_MAPPING:
        raise RecipeError(
            f"model.family={family!r} is no model_type of transformers: use llama, qwen3_moe, ..."
        )
    known = AutoConfig.for_model(family)
    unknown = [name for name in recipe.model.options if not hasattr(known, name)]
    if unknown:
        raise RecipeError(
            f"model.options: {family} has no {', '.join(unknown)}: use fields of {type(known).__name__}"
        )
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
    """Return the PEFT config of the adapter that the recipe describes, or the path of the saved adapter that it
    continues; ``None`` if all parameters train.
    """
    if not recipe.adapter or "path" in recipe.adapter:
        return recipe.adapter.get("path")
    fields = {name: value for name, value in recipe.adapter.items() if name != "method"}
    kind, fixed = config_class(recipe.adapter["method"])
    return made_of("adapter", kind, fields, {"task_type": task_of(recipe.data).adapter, **fixed})


def quantization_of(recipe: FinetuneRecipe | TeacherRecipe) -> BitsAndBytesConfig | str | None:
    """Return the quantization config of the base or teacher model: bitsandbytes' config, or the name of an extension's
    quantization. Return ``None`` if weights are not quantized in memory.
    """
    for name in added("quantizations"):
        if recipe.quantization == {name: True}:
            return name
    return (
        made_of("quantization", BitsAndBytesConfig, recipe.quantization, {})
        if recipe.quantization
        else None
    )
