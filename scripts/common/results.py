"""What a run leaves behind when training has ended."""

import shutil
from typing import Any

from omegaconf import OmegaConf

import hfscale

from .card import describe_layout, make_card
from .loop import Outcome
from .processes import barrier, is_main
from .recipe import Recipe
from .report import RunLog, plot_losses


def finish(
    model: Any,
    tokenizer: Any,
    recipe: Recipe,
    layout: hfscale.ParallelConfig,
    outcome: Outcome,
    log: RunLog,
    train_sequences: int,
) -> None:
    """Write ``checkpoint/`` (weights, tokenizer, card), ``loss.png``, ``recipe.yaml``; of a mixture, ``experts.png``.

    Call it on every rank.
    """
    log.close()
    directory = recipe.directory
    checkpoint = directory / "checkpoint"
    hfscale.save_pretrained(model, checkpoint)
    if is_main():
        tokenizer.save_pretrained(checkpoint)
        OmegaConf.save(OmegaConf.structured(recipe), directory / "recipe.yaml")
        plot_losses(log.path, directory / "loss.png", f"{recipe.name} ({describe_layout(layout)})")
        shutil.copyfile(directory / "loss.png", checkpoint / "loss.png")
        log.plot_loads()
        card = make_card(model.config, recipe, layout, outcome, log, train_sequences)
        card.save(checkpoint / "README.md")
        print(
            f"\n{recipe.name}: {describe_layout(layout)}, {outcome.tokens_per_second:,.0f} tokens/s, peak memory "
            f"{outcome.memory / 2**30:.2f} GiB\n"
            f"  validation loss {outcome.first_validation_loss:.4f} -> {outcome.validation_loss:.4f}, unigram entropy "
            f"{log.unigram_entropy:.4f} (nats per token)\n"
            f"  {checkpoint}, {log.path}, {directory / 'loss.png'}",
            flush=True,
        )
    barrier()
