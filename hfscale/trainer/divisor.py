"""What a step's loss is divided by."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def divisor(trainer: Any, items: Any, batches: Sequence[Mapping[str, Any]]) -> float | list[float] | None:
    """What the sum over a step's labels is divided by, where Trainer knows no better than all of them.

    A loss that is not divided by it is a mean for each batch. Trainer takes the mean of these; or adds them up, of a
    model that takes the number and makes nothing of it.

    Args:
        items: Trainer's ``num_items_in_batch``.
        batches: that a step accumulates.

    Returns:
        one number for the step; one for each batch, of all distinct ones; ``None`` for the number of all its labels.
    """
    loss = trainer.runtime.loss
    if loss is None:
        return None
    given = items is not None and trainer.model_accepts_loss_kwargs
    if given and loss.divides:
        return float(items) if loss.shift else None
    counts = torch.stack([loss.look(batch)[0].cpu() for batch in batches]).double()
    if trainer.accelerator.num_processes > 1:
        counts = trainer.accelerator.reduce(counts.to(trainer.accelerator.device), "sum")
    return [max(count, 1.0) * (1 if given else len(batches)) for count in counts.tolist()]
