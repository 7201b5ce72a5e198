"""Train a model on texts that it generates, by TRL's GRPOTrainer (with rewards) or DistillationTrainer (with a
teacher).
"""

import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset
from omegaconf import OmegaConf

import hfscale

from .batch_sizes import per_rank
from .chat import set_chat_template
from .checks import made_of
from .corpus import Document, read
from .main_process import on_main
from .results import write_weights
from .run_log import plot_losses, read_metrics, resumes_of
from .schema import DataRecipe, FinetuneRecipe, RecipeError
from .trainer import arguments_of, callbacks_of, optimizer_of, train_to_the_end

Reward = Callable[..., list[float]]


def exact_match(
    completions: Sequence[Any],
    answer: Sequence[str],
    **_: Any,
) -> list[float]:
    """Return, for each completion, a reward of 1 if it equals the expected answer up to leading and trailing spaces,
    else 0.
    """
    pairs = zip(map(_text, completions), answer, strict=True)
    return [float(said.strip() == wanted.strip()) for said, wanted in pairs]


def f1(
    completions: Sequence[Any],
    answer: Sequence[str],
    **_: Any,
) -> list[float]:
    """Return, for each completion, its F1 score against the expected answer, computed from their common words as in
    SQuAD (Rajpurkar et al. 2016, section 6).
    """
    rewards = []
    for said, wanted in zip(
        (_text(completion).split() for completion in completions),
        map(str.split, answer),
        strict=True,
    ):
        common = (Counter(said) & Counter(wanted)).total()
        rewards.append(2 * common / (len(said) + len(wanted)) if common else 0.0)
    return rewards


REWARDS: dict[str, Reward] = {"exact_match": exact_match, "f1": f1}


def reward_of(name: str) -> Reward:
    """Return a reward function by name: a built-in one, or ``module:function``, whose module is importable or in the
    current directory.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        reward: Reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(
            f"rewards: {name!r} is neither {' nor '.join(REWARDS)}, nor a function that can be imported ({error}): "
            "write module:function"
        ) from error
    return reward


def recompute_field(config_class: type) -> str:
    """Return the name of the field of a ``TrainingArguments`` class that turns on activation checkpointing;
    transformers 5.23 renamed the field and warns about the old name.
    """
    named = "activation_checkpointing" in inspect.signature(config_class).parameters
    return "activation_checkpointing" if named else "gradient_checkpointing"


def train_on_generations(
    model: Any,
    tokenizer: Any,
    recipe: FinetuneRecipe,
    layout: hfscale.ParallelConfig,
    given: dict[str, Any],
) -> None:
    """Train a model on texts that it generates, then write its weights and a plot; call it on every rank. ``given``
    holds further arguments of TRL's trainer, such as the teacher model of a distillation.
    """
    from .. import trl as trainers

    kind = "GRPO" if recipe.rewards else "Distillation"
    training = recipe.training
    config_class = getattr(importlib.import_module("trl"), f"{kind}Config")
    sizes = per_rank(training.batch_size, hfscale.batch_world(model), training.microbatch_size)
    fixed = arguments_of(recipe, model, *sizes)
    fixed |= {"eval_strategy": "no", recompute_field(config_class): training.gradient_checkpointing}
    if recipe.distils:
        fixed |= {"beta": recipe.teacher.beta, "temperature": recipe.teacher.temperature}
    else:
        given = {"reward_funcs": [reward_of(name) for name in recipe.rewards]}
    resumes = resumes_of(recipe)
    trainer = getattr(trainers, f"{kind}Trainer")(
        model=model,
        args=made_of("trl", config_class, recipe.trl, fixed),
        train_dataset=prompts_of(recipe.data, tokenizer),
        processing_class=tokenizer,
        optimizers=(optimizer_of(recipe, model), None),
        callbacks=callbacks_of(recipe, resumes),
        **given,
    )
    train_to_the_end(trainer, recipe, resumes)
    write_weights(trainer.model, recipe)
    on_main(lambda: _describe(tokenizer, recipe, layout))
    if trainer.states_aside is not None:
        trainer.states_aside.free()


def prompts_of(data: DataRecipe, tokenizer: Any) -> Dataset:
    """Return a data set of prompts to generate from (column ``prompt``), with the expected answers (column ``answer``)
    if the data has them.
    """
    documents, _ = read(data)
    messages = data.format == "chat" or not isinstance(
        documents[0].columns.get(data.prompt_column, ""), str
    )
    if messages or data.chat_template is not None:
        set_chat_template(tokenizer, data)
    return Dataset.from_list([_row(data, document) for document in documents])


def _row(data: DataRecipe, document: Document) -> dict[str, Any]:
    columns = document.columns
    if data.format == "prompts":
        others = {name: value for name, value in columns.items() if name != data.prompt_column}
        return {"prompt": columns[data.prompt_column], **others}
    if data.format == "completion":
        return {"prompt": columns[data.prompt_column], "answer": columns[data.completion_column]}
    *before, last = columns[data.messages_column]
    if not before or last["role"] != "assistant":
        raise RecipeError(
            f"{document.name} must be a conversation that ends with an answer of the assistant after its prompt: "
            "correct the data, or use data.format=prompts"
        )
    return {"prompt": before, "answer": last["content"]}


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _describe(tokenizer: Any, recipe: FinetuneRecipe, layout: hfscale.ParallelConfig) -> None:
    directory = recipe.directory
    name = "reward" if recipe.rewards else "loss"
    OmegaConf.save(OmegaConf.structured(recipe), directory / "recipe.yaml")
    places = ["adapter"] * bool(recipe.adapter) + ["checkpoint"] * (
        not recipe.adapter or bool(recipe.merge)
    )
    for place in places:
        tokenizer.save_pretrained(directory / place)
    records = read_metrics(recipe.metrics)[0]
    title = f"{recipe.name} ({layout.describe_schedule()})"
    plot_losses(recipe.metrics, directory / f"{name}.png", title, name)
    first = records[0]
    last = records[-1]
    print(
        f"\n{title}: {name} {first[name]:.4f} at step {first['step']}, {last[name]:.4f} at step {last['step']}\n"
        f"  {', '.join(str(directory / place) for place in places)}, {recipe.metrics}, {directory / name}.png",
        flush=True,
    )
