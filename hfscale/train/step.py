"""Run training and evaluation steps: the same few lines for every layout."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, check_number, check_switch
from .around import labels_around, refuse_loss_around, refuse_trained_around
from .distillation import ModelTeacher
from .inputs import prepare
from .outputs import KeptOutputs
from .runtime import Batch, Objective, Runtime, runtime_of
from .runtime.batches import Microbatch
from .user_loss import (
    LossOfOutputs,
    LossOfScores,
    UserFunction,
    UserLoss,
    loss_of_scores,
    refuse_without_flush,
)


def train_step(
    model: nn.Module,
    batch: Batch | Sequence[Batch],
    loss_fn: LossOfOutputs | None = None,
    *,
    label_smoothing: float = 0.0,
    num_items_in_batch: float | Sequence[float] | None = None,
    score_loss: LossOfScores | None = None,
    temperature: float = 1.0,
    routes: Tensor | Sequence[Tensor] | None = None,
    teacher: ModelTeacher | None = None,
) -> Tensor:
    """Run forward and backward over this rank's batch, and leave reduced gradients in ``.grad``.

    Loss and gradients are those of the mean over *all* valid labels of the step: every microbatch of every distinct
    batch counts by its number of labels, however the step was divided. Models with a loss of their own are weighted by
    rows or by labels, whichever it averages; ``print(plan)`` says which. Losses that :class:`hfscale.RoutingConfig`
    adds are means over the tokens of the step: in the gradients, not in the returned loss; see
    :func:`hfscale.expert_load`. Those of layers beyond the model's own are in both. Gradients add to ``.grad``.

    Args:
        batch: the keyword arguments of one forward pass, ``labels`` included, or a list of such (gradient
            accumulation). Ranks that share a batch (tensor ranks) pass the same one; see :func:`hfscale.batch_rank`.
            Every rank passes the same number of microbatches; one without rows counts nothing. Through pipeline stages,
            the list is the microbatches of the schedule; one batch is cut into ``num_microbatches`` along its rows.
        loss_fn: a loss of your own, for any class: ``loss_fn(outputs, batch) -> (sum, count)`` of a microbatch, where
            ``outputs`` is the model's output for it without ``labels``, with full logits, and ``batch`` all of its
            arguments, also those the model does not take. The step's loss is the sum of sums over the sum of counts, of
            all microbatches and distinct batches. It is called on the rank that has the head: with stages, the last
            one. There a batch may be cut between its rows: pass pairs of rows as a list of microbatches.
        label_smoothing: fraction, 0 to 1, of every target's probability that is spread evenly over the vocabulary.
        num_items_in_batch: divisor of the sum over all valid labels of the step, the same on every rank; by default,
            their number. Or a list with the divisor of each batch's sum: batches of 10, 30, 20 and 20 labels with
            ``[40, 120, 80, 80]`` add up to the mean of their means.
        score_loss: a loss of your own: ``score_loss(scores, index)`` returns a scalar for the scores of a microbatch
            (:class:`hfscale.TokenScores`) and its index in the list. The step's loss is their sum, averaged over the
            distinct batches. It is called on the rank that has the head: with stages, the last one.
        temperature: divisor of the logits for ``score_loss``.
        routes: the experts of every token, or a list of such for a list of batches: see :func:`hfscale.record_routes`.
        teacher: makes the loss of a label the divergence from this teacher's distribution of it.

    Returns:
        the loss, a scalar without a graph, equal on every rank; 0 if the step has no valid label. With schedules
        without a flush, loss and gradients are those of an earlier batch: see :func:`drain`.
    """
    runtime = runtime_of(model)
    refuse_loss_around(runtime, model)
    refuse_trained_around(runtime, model)
    _check_losses(
        runtime, loss_fn, score_loss, label_smoothing, num_items_in_batch, temperature, teacher
    )
    if loss_fn is not None:
        return UserLoss(runtime, loss_fn).run(model, batch, train=True, routes=routes)
    scored = (
        None
        if score_loss is None
        else UserFunction(runtime, "score_loss", score_loss, ("scores", "index"))
    )
    counted = num_items_in_batch is not None or score_loss is not None
    items = num_items_in_batch if counted else labels_around(runtime, model, batch)
    microbatches, count, objective = _prepared(
        runtime, batch, True, items, label_smoothing, teacher, routes
    )
    if scored is not None:
        objective = loss_of_scores(runtime, count, scored, temperature, batch, len(microbatches))
    loss = runtime.run_step(model, microbatches, objective, backward=True)
    if scored is not None:
        scored.agree()
    return loss


def _check_losses(
    runtime: Runtime,
    loss_fn: Any,
    score_loss: Any,
    smoothing: float,
    items: Any,
    temperature: float,
    teacher: ModelTeacher | None,
) -> None:
    """Refuse combinations of arguments that belong to different losses."""
    _check_teacher(runtime, teacher, bool(loss_fn or score_loss or smoothing))
    if (loss_fn or score_loss) and runtime.plan.adds_loss:
        _refuse_beside("loss_fn or score_loss", runtime.plan.adds_loss)
    check_number("label_smoothing", smoothing, least=0, most=1)
    check_number("temperature", temperature, above=0)
    divided = bool(smoothing) or items is not None
    if loss_fn is not None and (divided or score_loss is not None or temperature != 1):
        _refuse_beside("loss_fn", "label_smoothing, num_items_in_batch, score_loss and temperature")
    if score_loss is not None and divided:
        _refuse_beside("score_loss", "label_smoothing and num_items_in_batch")
    if score_loss is None and temperature != 1:
        raise ConfigError(
            f"temperature={temperature} needs a score_loss, and there is none: leave it out"
        )


def _check_teacher(runtime: Runtime, teacher: ModelTeacher | None, other: bool) -> None:
    if teacher is None:
        return
    if not isinstance(teacher, ModelTeacher):
        raise ConfigError(
            f"teacher must be hfscale.Teacher(teacher, model), got {type(teacher).__name__}"
        )
    teacher.check(runtime)
    refuse_without_flush(runtime, "teacher")
    if other or runtime.plan.adds_loss:
        besides = runtime.plan.adds_loss or "other terms of a loss"
        _refuse_beside("teacher", f"loss_fn, score_loss, label_smoothing and {besides}")


def _refuse_beside(loss: str, names: str) -> None:
    raise ConfigError(f"{loss} replaces the model's loss: leave {names} out")


def drain(model: nn.Module) -> Iterator[Tensor]:
    """Finish the microbatches that a schedule without a flush has in flight; do nothing with any other schedule.

    ``pipedream`` and ``pipedream_2bw`` return gradients of earlier batches than the last one: at the end of a run
    ``p - 1`` updates, or one, are missing. Continue with a loop like the one before::

        for loss in hfscale.drain(model):
            hfscale.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    Yields:
        the next batch's loss, once its gradients are in ``.grad``; as many times on every rank. Together with those
        that ``train_step`` returned, these are the losses of all batches, each once.
    """
    yield from runtime_of(model).executor.drain()


@torch.no_grad()
def eval_step(
    model: nn.Module,
    batch: Batch | Sequence[Batch],
    loss_fn: LossOfOutputs | None = None,
    *,
    label_smoothing: float = 0.0,
    num_items_in_batch: float | None = None,
    return_outputs: bool = False,
    teacher: ModelTeacher | None = None,
) -> Any:
    """Return the loss that :func:`train_step` would return, without gradients, in the model's current mode, and without
    those of layers beyond the model's own.

    Args:
        loss_fn, label_smoothing, num_items_in_batch, teacher: as for :func:`train_step`.
        return_outputs: return the model's outputs of this rank's batch as well.

    Returns:
        the loss, a scalar tensor; with ``return_outputs``, also the outputs: full tensors by the stock model's names
        (``outputs.logits``) on every rank and stage. A list for a list of batches. They are as large as in one process.
    """
    runtime = runtime_of(model)
    check_number("label_smoothing", label_smoothing, least=0, most=1)
    check_switch("return_outputs", return_outputs)
    _check_teacher(runtime, teacher, bool(loss_fn or label_smoothing))
    kept = KeptOutputs(runtime) if return_outputs else None
    if loss_fn is not None:
        if label_smoothing or num_items_in_batch is not None:
            _refuse_beside("loss_fn", "label_smoothing and num_items_in_batch")
        loss = UserLoss(runtime, loss_fn, kept).run(model, batch, train=False)
    else:
        if num_items_in_batch is None:
            num_items_in_batch = labels_around(runtime, model, batch)
        microbatches, _, mean = _prepared(
            runtime, batch, False, num_items_in_batch, label_smoothing, teacher
        )
        objective = mean if kept is None else kept.recording(mean)
        loss = runtime.run_step(model, microbatches, objective, backward=False)
    if kept is None:
        return loss
    single = isinstance(batch, Mapping)
    outputs = kept.gathered(1 if single else len(batch))
    return loss, outputs[0] if single else outputs


def _divisors(
    count: Tensor, asked: float | Sequence[float] | None, microbatches: int
) -> list[Tensor]:
    """Return the divisor of each microbatch's sum over labels: the same for those cut from one batch."""
    if asked is None:
        return [count] * microbatches
    given = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    if not given or microbatches % len(given):
        raise ConfigError(
            f"num_items_in_batch has {len(given)} numbers for a step of {microbatches} microbatches: give one, or one "
            "for each batch of the list"
        )
    values = [_divisor(batch, count, len(given) == 1) for batch in given]
    return [values[index * len(given) // microbatches] for index in range(microbatches)]


def _divisor(asked: Any, count: Tensor, alone: bool) -> Tensor:
    """Return one divisor, and 1 for a zero, which is refused where it is ``alone`` for several labels. A number on a
    device is not waited for: nan stands for what would be refused.
    """
    if isinstance(asked, Tensor) and asked.numel() == 1:
        if asked.device.type != "cpu":
            number = asked.detach().reshape(()).to(count.device, torch.get_default_dtype())
            zero = (number == 0) & (count <= 1) if alone else number == 0
            return torch.where(
                (number > 0) & number.isfinite(),
                number,
                torch.where(zero, 1.0, torch.nan),
            )
        asked = asked.item()
    check_number("num_items_in_batch", asked, least=0)
    if alone and asked == 0 and count > 1:
        raise ConfigError(
            f"num_items_in_batch=0 for a step of {int(count)} labels: give their number, or leave it out"
        )
    return torch.full((), float(asked) or 1.0, device=count.device)


def _prepared(
    runtime: Runtime,
    batch: Any,
    train: bool,
    items: Any,
    label_smoothing: float,
    teacher: ModelTeacher | None,
    routes: Any = None,
) -> tuple[list[Microbatch], Tensor, Objective]:
    """Return microbatches, the number of labels, and the objective: the model's own loss, or that of a teacher."""
    signals = None if teacher is None else teacher.signals(batch)
    microbatches, count = prepare(runtime, batch, train, routes=routes)
    divisors = _divisors(count, items, len(microbatches))
    if teacher is not None and signals is not None:
        return microbatches, count, teacher.objective(signals, divisors)
    loss = runtime.loss
    assert loss is not None  # checked as the step was prepared
    loss.check_smoothing(label_smoothing)
    mean = Objective(
        lambda model, batch, index: loss.loss_of(model, batch, divisors[index], label_smoothing)
    )
    return microbatches, count, mean


def batch_rank(model: nn.Module) -> int:
    """Return which of the step's distinct batches this rank gets: ``0 <= batch_rank < batch_world``."""
    return runtime_of(model).mesh.batch_rank


def batch_world(model: nn.Module) -> int:
    """Return the number of distinct batches of a step; ranks that share one (tensor ranks) have one ``batch_rank``."""
    return runtime_of(model).mesh.batch_world


def metrics(model: nn.Module) -> dict[str, float]:
    """Return numbers about the training so far, for a log; no communication, the same on every rank.

    Under ``mixed_precision="fp16"``: ``loss_scale``; ``steps_since_loss_scale_changed``; ``skipped_steps``, because a
    gradient overflowed on some rank; ``step_was_skipped``, 1.0 if the last one was. With several ranks, from the 13th
    step on, medians over about a minute: ``step_seconds``, and ``work_seconds/rank_N``, without its waits for other
    ranks. Besides, what features add (:meth:`hfscale.train.runtime.Part.metrics`). Empty otherwise.
    """
    runtime = runtime_of(model)
    return {name: value for part in runtime.parts for name, value in part.metrics(runtime).items()}


def logged_metrics(model: nn.Module) -> dict[str, float]:
    """Return those of :func:`metrics` that a trainer logs beside the loss."""
    runtime = runtime_of(model)
    logged = [part for part in runtime.parts if part.is_logged]
    return {name: value for part in logged for name, value in part.metrics(runtime).items()}
