"""Write the results of a run when training has ended."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import hfscale

from .card import Made, make_card
from .main_process import on_main
from .memory_limit import beside
from .run_log import plot_losses
from .samples import Sample, write_pictures
from .schema import FinetuneRecipe, Recipe
from .tasks import task_of
from .trainer import Outcome, RecipeTrainer


def finish(
    trainer: RecipeTrainer,
    tokenizer: Any,
    recipe: Recipe,
    layout: hfscale.ParallelConfig,
    outcome: Outcome,
    train_sequences: int,
    expected: Any = None,
    shown: Sequence[Sample] = (),
) -> None:
    """Write the weights, tokenizer, card, ``loss.png`` and ``recipe.yaml``; for a mixture, ``experts.png``. Call it on
    every rank.

    The weights are in ``checkpoint/``, or in ``adapter/`` where an adapter was trained; merged as well in the former
    where the recipe says so. The card shows the ``expected`` memory beside the measured one, and the answers ``shown``.
    """
    directory, model = recipe.directory, trainer.trained
    adapted = recipe if isinstance(recipe, FinetuneRecipe) and recipe.adapter else None

    def clear() -> None:  # what an earlier run of this name has left would be taken for this one's
        for name in ("adapter", "checkpoint"):
            shutil.rmtree(directory / name, ignore_errors=True)

    on_main(clear)
    made = [Made("full", outcome.validation_loss, outcome.accuracy)]
    if adapted:
        coverage = hfscale.coverage_report(model)
        made = [Made("adapter", outcome.validation_loss, outcome.accuracy, coverage)]
    hfscale.save_pretrained(model, directory / made[0].directory)
    if adapted and adapted.merge:
        dtype = getattr(torch, adapted.merge) if isinstance(adapted.merge, str) else None
        model = hfscale.merge_and_unload(model, dtype=dtype)  # unpacked where it is quantized
        hfscale.save_pretrained(model, directory / "checkpoint")
        loss, accuracy = trainer.measured(model)
        trainer.log({"merged_validation_loss": loss})
        made.append(replace(made[0], kind="merged", validation_loss=loss, accuracy=accuracy))

    def describe() -> None:
        OmegaConf.save(OmegaConf.structured(recipe), directory / "recipe.yaml")
        title = f"{recipe.name} ({layout.describe_schedule()})"
        plot_losses(recipe.metrics, directory / "loss.png", title, task_of(recipe.data))
        if recipe.expert_loads.is_file():
            hfscale.ExpertLoadHistory.read(recipe.expert_loads).plot(directory / "experts.png")
        for part in made:
            target = directory / part.directory
            tokenizer.save_pretrained(target)
            shutil.copyfile(directory / "loss.png", target / "loss.png")
            write_pictures(shown, target)
            card = make_card(model.config, recipe, layout, outcome, train_sequences, part, expected, shown)
            card.save(target / "README.md")
        print(_summary(recipe, layout, outcome, made, expected), flush=True)

    on_main(describe)


def _summary(
    recipe: Recipe,
    layout: hfscale.ParallelConfig,
    outcome: Outcome,
    made: list[Made],
    expected: Any,
) -> str:
    task = task_of(recipe.data)
    lines = [
        f"\n{recipe.name}: {layout.describe_schedule()}, {outcome.tokens_per_second:,.0f} tokens/s, peak memory "
        f"{outcome.memory / 2**30:.2f} GiB",
        f"  validation loss {outcome.first_validation_loss:.4f} -> {outcome.validation_loss:.4f}, {task.baseline} "
        f"{outcome.baseline:.4f} (nats per {task.each})",
    ]
    lines += [f"  accuracy {outcome.accuracy:.1%}"] if outcome.accuracy is not None else []
    lines += [f"  merged: validation loss {part.validation_loss:.4f}" for part in made if part.kind == "merged"]
    lines += [f"  {beside(expected, outcome)}"] if expected is not None else []
    written: list[Path] = [*(recipe.directory / part.directory for part in made), recipe.metrics]
    return "\n".join([*lines, f"  {', '.join(map(str, written))}, {recipe.directory / 'loss.png'}"])
