"""Fine-tune all parameters of a checkpoint: one of ``scripts/pretrain.py``, any other directory, or a model on the Hub.

    accelerate launch --multi_gpu --num_processes 2 scripts/finetune.py --config scripts/recipes/demo_finetune.yaml

As for pretraining, any key of the recipe can be given behind it, and results go to ``runs/<name>``.
"""

from pathlib import Path
from typing import Any

from common.borders import check_borders
from common.data import prepare
from common.loop import train
from common.processes import run
from common.read_recipe import recipe_from_command_line
from common.recipe import FinetuneRecipe, RecipeError
from common.report import RunLog
from common.results import finish
from transformers import AutoTokenizer

import hfscale


def main() -> None:
    recipe = recipe_from_command_line(FinetuneRecipe, "Fine-tune all parameters of a checkpoint.")
    layout = hfscale.ParallelConfig(**recipe.parallel)
    check_base(recipe)
    model, tokenizer = load(recipe, layout)
    if recipe.data.is_packed:
        check_borders(model.config)
    tokenizer, train_data, validation_data, entropy = prepare(recipe.data, tokenizer, len(tokenizer), recipe.directory)
    log = RunLog(recipe.directory, recipe.name, recipe.training.steps, entropy)
    outcome = train(model, recipe, train_data, validation_data, log)
    finish(model, tokenizer, recipe, layout, outcome, log, len(train_data))


def check_base(recipe: FinetuneRecipe) -> None:
    """Refuse a directory that is not a checkpoint, before anything is loaded."""
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


def load(recipe: FinetuneRecipe, layout: hfscale.ParallelConfig) -> tuple[Any, Any]:
    """The sharded model, in 32-bit weights whatever the checkpoint has, and its tokenizer."""
    try:
        model = hfscale.from_pretrained(
            recipe.base,
            parallel=layout,
            seed=recipe.seed,
            mixed_precision=recipe.training.mixed_precision,
            routing=hfscale.RoutingConfig(**recipe.routing) if recipe.routing else None,
            dtype="float32",
        )
        return model, AutoTokenizer.from_pretrained(recipe.base)
    except OSError as error:
        raise RecipeError(f"base={recipe.base!r} cannot be loaded: {error}") from error


if __name__ == "__main__":
    run(main)
