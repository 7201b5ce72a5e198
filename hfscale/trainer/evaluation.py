"""One step of ``Trainer.evaluate`` and ``predict``, in any layout.

Data ranks are dealt batches of one size, and the last ones are filled up with rows from the beginning. Trainer drops
what is made of those again; here they do not count in the loss either, which so is that of one process.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..train import eval_step, predict_step
from .batches import rows_of, with_rows, without_labels


def prediction_step(
    trainer: Any,
    model: nn.Module,
    inputs: Mapping[str, Any],
    loss_only: bool,
    ignore_keys: list[str] | None,
    stock: Callable[..., tuple[Any, Any, Any]],
) -> tuple[Tensor | None, Any, Any]:
    """Loss of all distinct batches, logits and labels of this rank's.

    Args:
        stock: Trainer's own, which runs where logits are wanted and there are no stages.
    """
    smoothing, stages = trainer.args.label_smoothing_factor, trainer.runtime.plan.stages is not None
    if inputs.get("labels") is None and not stages:
        return stock(model, inputs, loss_only, ignore_keys)
    rows = rows_of(inputs)
    own = trainer.accelerator.rows_of_data_set(rows)
    counted = inputs if own == rows else without_labels(inputs, since=own)
    if not loss_only and not stages and not smoothing:
        loss, logits, labels = stock(model, counted, loss_only, ignore_keys)
        return trainer.accelerator.reduce(loss, "mean"), logits, labels
    full = with_rows(counted, trainer.args.per_device_eval_batch_size) if stages else counted
    if inputs.get("labels") is None:
        full = {**full, "labels": torch.full_like(full["input_ids"], -100)}
    if loss_only:
        return eval_step(model, full, label_smoothing=smoothing).float(), None, None
    loss, logits = predict_step(model, full, label_smoothing=smoothing)
    if inputs.get("labels") is None:
        return None, logits[:rows], None
    return loss.float(), logits[:rows], inputs["labels"].to(logits.device)
