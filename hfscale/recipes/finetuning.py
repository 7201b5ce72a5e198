"""Fine-tuning: all parameters of a checkpoint, or an adapter over it, quantized or not, in any layout."""

from typing import Any

import hfscale
from hfscale.guards import check_packed_rows

from .adapting import adapter_of, quantization_of
from .dataset import prepare
from .layouts import layout_of
from .loop import train
from .main_process import is_main
from .memory_limit import expect_memory
from .places import check_places
from .read import recipe_and_limit
from .results import finish
from .run_log import RunLog
from .samples import answers, samples
from .schema import FinetuneRecipe, RecipeError
from .tasks import model_options, task_of


def main() -> None:
    """The run that the command line asks for."""
    finetune(*recipe_and_limit(FinetuneRecipe, "Fine-tune a checkpoint, or an adapter over it."))


def finetune(recipe: FinetuneRecipe, limit: float | None = None) -> None:
    """The whole run; call it on every rank.

    Args:
        limit: more GiB than this on one rank are too many; ``None`` makes no estimate.
    """
    layout = layout_of(recipe)
    check_places(recipe)
    model, tokenizer = load(recipe, layout)
    if recipe.adapter and is_main():
        print(hfscale.coverage_report(model), flush=True)
    expected = expect_memory(model, recipe, limit)
    if recipe.data.is_packed:
        check_packed_rows(model, tokens=recipe.data.sequence_length)
    tokenizer, train_data, validation_data, baseline = prepare(recipe.data, tokenizer, 0, recipe.directory)
    log = RunLog.of(recipe, baseline)
    asked = recipe.data.samples
    before = answers(model, tokenizer, validation_data, asked)
    outcome = train(model, recipe, train_data, validation_data, log, tokenizer)
    after = answers(model, tokenizer, validation_data, asked)
    shown = samples(tokenizer, validation_data, before, after)
    finish(model, tokenizer, recipe, layout, outcome, log, len(train_data), validation_data, expected, shown)


def load(recipe: FinetuneRecipe, layout: hfscale.ParallelConfig) -> tuple[Any, Any]:
    """The sharded model, in the recipe's type whatever the checkpoint has, and its tokenizer or processor."""
    quantization = quantization_of(recipe)
    quantized: dict[str, Any] = {} if quantization is None else {"quantization_config": quantization}
    try:
        task = task_of(recipe.data)
        tokenizer = task.reader.from_pretrained(recipe.base)
        inner = getattr(tokenizer, "tokenizer", tokenizer)
        if (task.loss is not None or inner is not tokenizer) and inner.pad_token_id is None:
            inner.pad_token = inner.eos_token  # behind whole texts, whose end a decoder finds by it
        model = hfscale.from_pretrained(
            recipe.base,
            parallel=layout,
            seed=recipe.seed,
            mixed_precision=recipe.training.mixed_precision,
            routing=hfscale.RoutingConfig(**recipe.routing) if recipe.routing else None,
            memory=hfscale.MemoryConfig(**recipe.memory),
            float8=hfscale.Float8Config(**recipe.float8) if recipe.float8 else None,
            use_liger_kernel=recipe.training.use_liger_kernel,
            peft_config=adapter_of(recipe),
            dtype=recipe.training.dtype,
            **quantized,
            **model_options(recipe.data, inner.pad_token_id),
        )
        return model, tokenizer
    except (OSError, ImportError) as error:
        raise RecipeError(f"base={recipe.base!r} cannot be loaded: {error}") from error
