"""Fine-tune a checkpoint, of ``scripts/pretrain.py``, in any other directory or on the Hub: all its parameters, or an
adapter over it, quantized or not, in any layout.

    accelerate launch --multi_gpu --num_processes 2 scripts/finetune.py --config scripts/recipes/demo_lora.yaml

As for pretraining, any key of the recipe can be given behind it, and results go to ``runs/<name>``.
``--max-memory`` says what each rank will need before training starts, and ``--max-memory=40`` stops where that is more
than 40 GiB.
"""

from pathlib import Path
from typing import Any

from common.adapting import adapter_of, check_adapter_place, quantization_of
from common.borders import check_borders
from common.data import prepare
from common.loop import train
from common.memory import expect_memory
from common.processes import is_main, run
from common.read_recipe import recipe_and_limit
from common.recipe import FinetuneRecipe, RecipeError
from common.report import RunLog
from common.results import finish
from transformers import AutoTokenizer

import hfscale


def main() -> None:
    finetune(*recipe_and_limit(FinetuneRecipe, "Fine-tune a checkpoint, or an adapter over it."))


def finetune(recipe: FinetuneRecipe, limit: float | None = None) -> None:
    """The whole run; call it on every rank.

    Args:
        limit: more GiB than this on one rank are too many; ``None`` makes no estimate.
    """
    layout = hfscale.ParallelConfig(**recipe.parallel)
    check_base(recipe)
    model, tokenizer = load(recipe, layout)
    if recipe.adapter and is_main():
        print(hfscale.coverage_report(model), flush=True)
    expected = expect_memory(model, recipe, limit)
    if recipe.data.is_packed:
        check_borders(model.config)
    tokenizer, train_data, validation_data, entropy = prepare(recipe.data, tokenizer, len(tokenizer), recipe.directory)
    log = RunLog(recipe.directory, recipe.name, recipe.training.steps, entropy)
    outcome = train(model, recipe, train_data, validation_data, log)
    finish(model, tokenizer, recipe, layout, outcome, log, len(train_data), validation_data, expected)


def check_base(recipe: FinetuneRecipe) -> None:
    """Refuse a directory that is not a checkpoint, or that the run would replace, before anything is loaded."""
    base = Path(recipe.base)
    if base.is_dir() and not (base / "config.json").is_file():
        raise RecipeError(f"base={recipe.base!r} is a directory without config.json: give that of a checkpoint")
    # A Hub id has at most one slash.
    if not base.is_dir() and (recipe.base.count("/") > 1 or recipe.base.startswith(("/", "."))):
        raise RecipeError(
            f"base={recipe.base!r} is not there: pretrain first (scripts/pretrain.py --config "
            "scripts/recipes/demo_pretrain.yaml), or give the directory of a checkpoint or the id of a model on the Hub"
        )
    if base.resolve() == (recipe.directory / "checkpoint").resolve():
        raise RecipeError(
            f"base={recipe.base!r} is where name={recipe.name!r} will be written: choose another name, so that the "
            "checkpoint to start from is kept"
        )
    check_adapter_place(recipe)


def load(recipe: FinetuneRecipe, layout: hfscale.ParallelConfig) -> tuple[Any, Any]:
    """The sharded model, in the recipe's type whatever the checkpoint has, and its tokenizer."""
    quantization = quantization_of(recipe)
    try:
        model = hfscale.from_pretrained(
            recipe.base,
            parallel=layout,
            seed=recipe.seed,
            mixed_precision=recipe.training.mixed_precision,
            routing=hfscale.RoutingConfig(**recipe.routing) if recipe.routing else None,
            peft_config=adapter_of(recipe),
            dtype=recipe.training.dtype,
            **({} if quantization is None else {"quantization_config": quantization}),
        )
        return model, AutoTokenizer.from_pretrained(recipe.base)
    except OSError as error:
        raise RecipeError(f"base={recipe.base!r} cannot be loaded: {error}") from error


if __name__ == "__main__":
    run(main)
