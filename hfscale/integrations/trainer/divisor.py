"""Choose the divisor of a step's loss."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def divisor(trainer: Any, items: Any, batches: Sequence[Mapping[str, Any]]) -> float | list[float] | None:
    """Return the divisor of a step's summed loss as Trainer would apply it.

    A loss that is not divided by ``num_items_in_batch`` is a mean per batch. Trainer takes the mean of these, or their
    sum if the model accepts that number without using it.

    Args:
        items: Trainer's ``num_items_in_batch``.
        batches: the batches that a step accumulates.

    Returns:
        one number for the step; or one for each batch, over all distinct batches; ``None`` for the number of all its
        labels.
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
