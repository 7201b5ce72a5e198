"""What a step's loss is divided by."""

from typing import Any


def divisor(trainer: Any, items: Any, microbatches: int) -> float | None:
    """What the sum over a step's labels is divided by, where Trainer knows no better than all of them.

    A loss that is not divided by it, though the model takes it, is a mean for each microbatch, and Trainer adds these
    up.

    Args:
        items: Trainer's ``num_items_in_batch``.
        microbatches: of the step.
    """
    loss = trainer.runtime.loss
    if items is None or loss is None or not trainer.model_accepts_loss_kwargs:
        return None
    if loss.divides:
        return float(items) if loss.shift else None
    return float(items) / microbatches
