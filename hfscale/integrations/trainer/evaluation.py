"""Run one step of ``Trainer.evaluate`` and ``predict``, in any layout.

Data ranks get batches of one size, the last ones padded with rows from the beginning. Trainer drops their outputs; here
they do not count in the loss either, which therefore equals that of one process.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn

from ..._compat.transformers.trainer import labels_of_step
from ...errors import ConfigError
from ...train import eval_step, predict_step
from ...train.runtime import Executor
from .trainer_batches import first_examples, first_of_chunks, pieces, rows_of, with_rows

_MOST_ADDED = 64


def scored_step(
    trainer: Any,
    model: nn.Module,
    inputs: Mapping[str, Any],
    loss_only: bool,
    ignore_keys: list[str] | None,
    stock: Callable[..., tuple[Any, Any, Any]],
) -> tuple[Tensor | None, Any, Any]:
    """Run a step whose loss is the trainer's own mean over the labels of this rank's batch."""
    known = trainer.accelerator.examples_of(inputs)
    counted = inputs if known is None else first_examples(inputs, known, drop=False)
    shifted = counted.get("shift_labels")
    labels: Tensor = counted["labels"][:, 1:] if shifted is None else shifted
    valid = (labels != -100).sum().to(trainer.args.device)
    loss, logits, given = stock(model, dict(counted), loss_only, ignore_keys)
    if loss is not None and trainer.accelerator.num_processes > 1:
        sums = trainer.accelerator.reduce(torch.stack((loss.float() * valid, valid.float())), "sum")
        loss = sums[0] / sums[1].clamp(min=1)
    return loss, logits, given


def counted_step(
    trainer: Any,
    model: nn.Module,
    inputs: Mapping[str, Any],
    known: tuple[int, int],
    ignore_keys: list[str] | None,
    stock: Callable[..., tuple[Any, Any, Any]],
) -> tuple[Tensor | None, Any, Any]:
    """Run a step whose loss is TRL's mean over rows, or pairs of them; its metrics are over the same rows.

    Args:
        known: how many examples this rank's batch has, and how many of these are not repeated.
    """
    accelerator = trainer.accelerator
    repeated = accelerator.gather(torch.tensor([known[0] - known[1]], device=accelerator.device))
    if not repeated.any():
        return stock(model, inputs, True, ignore_keys)
    with accelerator.counting(known[1]):
        loss, *rest = stock(model, first_of_chunks(inputs, known[0], max(known[1], 1)), True, ignore_keys)
        return accelerator.gather(loss).mean(), *rest


def prediction_step(
    trainer: Any,
    model: nn.Module,
    inputs: Mapping[str, Any],
    loss_only: bool,
    ignore_keys: list[str] | None,
    stock: Callable[..., tuple[Any, Any, Any]],
) -> tuple[Tensor | None, Any, Any]:
    """Return the loss of all distinct batches, and logits and labels of this rank's.

    Args:
        stock: Trainer's own step, which runs if logits are wanted and there are no stages.
    """
    smoothing, stages = trainer.args.label_smoothing_factor, trainer.runtime.plan.stages is not None
    if inputs.get("labels") is None and not stages:
        return stock(model, inputs, loss_only, ignore_keys)
    loss_of, known = trainer.runtime.loss, trainer.accelerator.examples_of(inputs)
    counted = inputs if known is None else first_examples(inputs, known, drop=not loss_of.ignores)
    by_host = bool(smoothing) and trainer.runtime.plan.loss is None  # a class that computes its own loss
    if stages or ((loss_only or smoothing) and not by_host):
        return _by_steps(trainer, model, inputs, counted, loss_only)
    masked = loss_of.ignores or known is None
    loss, logits, labels = stock(model, counted if masked else inputs, loss_only, ignore_keys)
    # Trainer assumes a loss divided by the labels of all data ranks, and multiplies it by their number.
    right = masked and (loss_of.divides or trainer.accelerator.num_processes == 1)
    loss = trainer.accelerator.reduce(loss, "mean") if right else eval_step(model, counted).float()
    return loss, convert_to_fp32(logits), labels


def _by_steps(
    trainer: Any, model: nn.Module, inputs: Mapping[str, Any], counted: Mapping[str, Any], loss_only: bool
) -> tuple[Tensor | None, Any, Any]:
    """Run :func:`hfscale.eval_step`; ``counted`` is the batch without repeated rows."""
    loss_of, rows, labelled = trainer.runtime.loss, rows_of(inputs), inputs.get("labels") is not None
    staged, most = trainer.runtime.plan.stages is not None, trainer.args.per_device_eval_batch_size
    full = counted
    if staged:
        most = _fitting(trainer.runtime.executor, most)
        full = with_rows(counted, most) if loss_of.ignores else counted
    if not labelled:
        full = {**full, "labels": torch.full_like(full["input_ids"], -100)}
    items = float(labels_of_step(trainer, [full])) if loss_of.shift else None
    given: dict[str, Any] = {"label_smoothing": trainer.args.label_smoothing_factor, "num_items_in_batch": items}
    if staged and not loss_of.ignores:
        return _by_pieces(trainer, model, inputs, pieces(trainer.runtime.executor, [full], 1, most)[0], loss_only)
    if loss_only:
        return eval_step(model, full, **given).float() if labelled else None, None, None
    loss, logits = predict_step(model, full, **given)
    logits = convert_to_fp32(logits)[:rows]
    if not labelled:
        return None, logits, None
    # Repeated examples that are packed into one row have no labels.
    return loss.float(), logits, (counted if loss_of.ignores else inputs)["labels"].to(logits.device)


def _by_pieces(
    trainer: Any, model: nn.Module, inputs: Mapping[str, Any], given: list[Mapping[str, Any]], loss_only: bool
) -> tuple[Tensor | None, Any, Any]:
    """Run a loss without an ignored label through stages."""
    with trainer.runtime.executor.uncut():
        if loss_only:
            return eval_step(model, given).float(), None, None
        loss, outputs = eval_step(model, given, return_outputs=True)
    found = [each.logits[: rows_of(piece)] for each, piece in zip(outputs, given, strict=True)]
    logits = convert_to_fp32(torch.cat(found))
    return loss.float(), logits, inputs["labels"].to(logits.device)


def _fitting(executor: Executor, rows: int) -> int:
    """Return the least number of rows, at least ``rows``, that the schedule can cut into microbatches."""
    for more in range(_MOST_ADDED):
        row = torch.zeros(rows + more, 2, dtype=torch.int64)
        try:
            executor.share_out([{"input_ids": row, "labels": row}])
        except ConfigError:
            continue
        return rows + more
    return rows
