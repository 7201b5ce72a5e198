"""Pretrain a small Llama, or a decoder of another family, with a tokenizer of its own, from random weights.

    accelerate launch --multi_gpu --num_processes 2 scripts/pretrain.py --config scripts/recipes/demo_pretrain.yaml

starts two ranks, over gloo where there are no GPUs (then set OMP_NUM_THREADS=1). Any key of the recipe can be given
behind it: ``training.steps=20 parallel.tp_size=1 parallel.dp_shard_size=2``. Results go to ``runs/<name>``.
"""

from common.data import END_OF_TEXT_ID, prepare
from common.loop import train
from common.processes import run
from common.read_recipe import recipe_from_command_line
from common.recipe import PretrainRecipe, RecipeError
from common.report import RunLog
from common.results import finish
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

import hfscale


def main() -> None:
    recipe = recipe_from_command_line(PretrainRecipe, "Pretrain a small model from random weights.")
    layout = hfscale.ParallelConfig(**recipe.parallel)
    model = hfscale.from_config(
        config_of(recipe),
        parallel=layout,
        seed=recipe.seed,
        mixed_precision=recipe.training.mixed_precision,
        routing=hfscale.RoutingConfig(**recipe.routing) if recipe.routing else None,
    )
    tokenizer, train_data, validation_data, entropy = prepare(
        recipe.data, None, recipe.model.vocab_size, recipe.directory
    )
    log = RunLog(recipe.directory, recipe.name, recipe.training.steps, entropy)
    outcome = train(model, recipe, train_data, validation_data, log)
    finish(model, tokenizer, recipe, layout, outcome, log, len(train_data))


def config_of(recipe: PretrainRecipe) -> PreTrainedConfig:
    """The config of the model to start."""
    family, fields = recipe.model.family, {**vars(recipe.model), **recipe.model.options}
    if family not in CONFIG_MAPPING:
        raise RecipeError(f"model.family={family!r} is no model_type of transformers: use llama, qwen3_moe, ...")
    known = AutoConfig.for_model(family)
    unknown = [name for name in recipe.model.options if not hasattr(known, name)]
    if unknown:
        raise RecipeError(f"model.options: {family} has no {', '.join(unknown)}: use fields of {type(known).__name__}")
    return AutoConfig.for_model(
        family,
        **{name: value for name, value in fields.items() if name not in ("family", "options")},
        max_position_embeddings=2 * recipe.data.sequence_length,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
    )


if __name__ == "__main__":
    run(main)
