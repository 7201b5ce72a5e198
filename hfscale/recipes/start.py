"""Carry out a recipe in this process: the only one, or one of those that a launcher has started."""

from collections.abc import Callable

import torch.distributed as dist

from .finetuning import finetune
from .main_process import run
from .pretraining import pretrain
from .schema import FinetuneRecipe, PretrainRecipe

AnyRecipe = PretrainRecipe | FinetuneRecipe


def start(recipe: AnyRecipe, limit: float | None = None) -> None:
    """The whole run; call it on every rank.

    Args:
        limit: more GiB than this on one rank are too many; ``None`` makes no estimate.
    """
    try:
        if isinstance(recipe, FinetuneRecipe):
            finetune(recipe, limit)
        else:
            pretrain(recipe, limit)
    finally:
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()


def start_rank(read: Callable[[], AnyRecipe], limit: float | None = None) -> None:
    """The same as a process of a launcher's: an error that the user can mend ends it, with its message alone."""
    run(lambda: start(read(), limit))
