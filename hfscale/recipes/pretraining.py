"""Pretraining: a model from random weights, with a tokenizer of its own."""

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

import hfscale

from .._compat.transformers.configs import made_or_explained
from .dataset import END_OF_TEXT_ID, prepare
from .layouts import layout_of
from .loop import train
from .memory_limit import expect_memory
from .places import check_places
from .read import recipe_and_limit
from .results import finish
from .run_log import RunLog
from .samples import answers, samples
from .schema import PretrainRecipe, RecipeError


def main() -> None:
    """The run that the command line asks for."""
    pretrain(*recipe_and_limit(PretrainRecipe, "Pretrain a small model from random weights."))


def pretrain(recipe: PretrainRecipe, limit: float | None = None) -> None:
    """The whole run; call it on every rank.

    Args:
        limit: more GiB than this on one rank are too many; ``None`` makes no estimate.
    """
    layout = layout_of(recipe)
    check_places(recipe)
    model = hfscale.from_config(
        config_of(recipe),
        parallel=layout,
        seed=recipe.seed,
        mixed_precision=recipe.training.mixed_precision,
        routing=hfscale.RoutingConfig(**recipe.routing) if recipe.routing else None,
        memory=hfscale.MemoryConfig(**recipe.memory),
        float8=hfscale.Float8Config(**recipe.float8) if recipe.float8 else None,
        use_liger_kernel=recipe.training.use_liger_kernel,
    )
    expected = expect_memory(model, recipe, limit)
    tokenizer, train_data, validation_data, entropy = prepare(
        recipe.data, None, recipe.model.vocab_size, recipe.directory
    )
    log = RunLog.of(recipe, entropy)
    asked = recipe.data.samples
    before = answers(model, tokenizer, validation_data, asked)
    outcome = train(model, recipe, train_data, validation_data, log)
    after = answers(model, tokenizer, validation_data, asked)
    shown = samples(tokenizer, validation_data, before, after)
    finish(model, tokenizer, recipe, layout, outcome, log, len(train_data), expected=expected, shown=shown)


def config_of(recipe: PretrainRecipe) -> PreTrainedConfig:
    """The config of the model to start."""
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
