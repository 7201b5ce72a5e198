"""Prepare a step: check its microbatches, compare them between ranks, count valid labels, and copy to the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._host.transformers.classes import class_name, takes_argument
from .._host.transformers.computing import uses_flash_attention
from ..errors import ConfigError
from ..guards import check_model, check_packed_rows, without_gaps
from ..runtime import Batch, Runtime, StepLoss
from ..runtime.batches import Microbatch, agree, known, look_at, to_device, total_of, with_borders
from .batch_check import check_microbatch, microbatches_of


def prepare(
    runtime: Runtime, batch: Batch | Sequence[Batch], train: bool, loss: StepLoss | None = None
) -> tuple[list[Microbatch], Tensor]:
    """Return the microbatches on this rank's device, and the number of valid labels in the whole step (at least 1).

    Args:
        loss: the loss that the step is normalized for; by default the model's.

    Raises:
        ConfigError: on every rank, if one refuses its batch or the model cannot be trained this way.
    """
    if not train:  # before a training step that was looked at by itself
        check_model(runtime)
    loss = _loss_of(runtime, loss)
    mesh, rows, refused = runtime.mesh, list[list[int]](), None
    microbatches = list[Microbatch]()
    try:
        given, rows = _agreed(runtime, loss, batch, train)
        _refuse_outside(runtime, sum(outside for _, outside, _ in rows))
        microbatches = [known(each, row) for each, row in zip(given, rows, strict=True)]
        if packed := [each for each, row in zip(microbatches, rows, strict=True) if row[2]]:
            check_packed_rows(runtime.model, packed)
        microbatches = [runtime.context.shard_batch(each) for each in microbatches]
    except ConfigError as error:  # ranks with other batches must not wait for this one
        refused = error
    valid = sum(valid for valid, _, _ in rows)
    control = mesh.control if mesh.data_world > 1 else None
    passes = runtime.executor.passes_together(len(microbatches))
    total = total_of(valid, refused, control, mesh.speaks_for_batch, passes)
    if uses_flash_attention(runtime.model):
        model = runtime.model
        microbatches = [each.like(with_borders(each, model)) if each.restarts else each for each in microbatches]
    microbatches = to_device(microbatches, mesh.device)
    if takes_argument(runtime.model, "use_cache"):
        for microbatch in microbatches:
            microbatch.setdefault("use_cache", False)  # a cache of keys and values is for generation
    return microbatches, torch.full((), max(total, 1), dtype=torch.int64, device=mesh.device)


def _agreed(
    runtime: Runtime, loss: StepLoss, batch: Batch | Sequence[Batch], train: bool
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the microbatches, checked and compared with the ranks that share them, and the rows of :func:`agree`."""
    executor, sharing = runtime.executor, runtime.mesh.sharing
    agrees = executor.agrees(train)
    given, seen, refused = list[dict[str, Any]](), None, None
    told: tuple[list[int], list[Tensor]] = [], []
    try:
        given = _microbatches(runtime, batch, loss)
        told = executor.tell(train) if agrees else told
        seen = look_at(given, loss.look, hashed=sharing is not None, tokens=_vocabulary(runtime, given))
    except ConfigError as error:  # the others must not wait for this rank
        refused, told = error, executor.tell(False) if agrees else told
    rows, ranks = agree(given, seen, train, sharing if agrees else None, *told)
    if refused is not None:
        raise refused
    if agrees:
        executor.hear(ranks)
    return given, rows


def _loss_of(runtime: Runtime, asked: StepLoss | None) -> StepLoss:
    """Return the loss that the step is normalized for; refuse models and parameters that no batch can train."""
    loss = asked or runtime.loss
    if loss is None:
        raise ConfigError(
            f"train_step normalizes a causal language model's loss, and {class_name(runtime.model)} has another "
            f"(loss_type {getattr(runtime.model, 'loss_type', None)!r}): give train_step a loss_fn, or loop over loss "
            "= model(**batch).loss and loss.backward() instead"
        )
    if unknown := runtime.unplanned_parameters():
        raise ConfigError(
            f"{len(unknown)} parameters that train are not in the plan, {unknown[0]} for one, so nobody would sum "
            "their gradients: give adapters to hfscale.get_peft_model(model, config), and change a model otherwise "
            "before it is parallelized"
        )
    return loss


def _vocabulary(runtime: Runtime, batches: Sequence[Batch]) -> int | None:
    """Return the size of the vocabulary if input ids have to be checked against it, else ``None``.

    A sharded embedding does not fail on ids outside of it; with a full one, a rank whose lookup fails would leave the
    others waiting, and the check is free for ids on the CPU.
    """
    shape, ids = runtime.plan.lookup_shape, [batch.get("input_ids") for batch in batches]
    on_host = all(each is None or each.device.type == "cpu" for each in ids) and runtime.mesh.control is not None
    return shape[0] if shape is not None and (on_host or runtime.plan.embedding is not None) else None


def _refuse_outside(runtime: Runtime, outside: int) -> None:
    if outside:
        head = runtime.plan.by_name.get(f"{runtime.plan.head}.weight")
        known = (runtime.plan.lookup_shape or (0,))[0] if head is None else head.shape[0]
        raise ConfigError(
            f"{outside} labels or input tokens are outside of the vocabulary of {known}: mask labels with -100, and "
            "resize the embeddings for a tokenizer with more tokens before the model is parallelized"
        )


def _microbatches(runtime: Runtime, batch: Batch | Sequence[Batch], loss: StepLoss) -> list[dict[str, Any]]:
    """Check the given batch and return the microbatches that go through the model."""
    given = microbatches_of(batch)
    for microbatch in given:
        check_microbatch(runtime, microbatch, loss)
    filled = [without_gaps(runtime, microbatch) for microbatch in given]
    if not loss.needs_labels and any(new is not old for new, old in zip(filled, given, strict=True)):
        raise ConfigError("this rank's batch has no rows, and loss_fn would be given padding: pass a row at least")
    given = runtime.executor.share_out([dict(microbatch) for microbatch in filled])
    for part in runtime.parts:
        part.check_step(runtime, given, user_loss=not loss.needs_labels)
    return given
