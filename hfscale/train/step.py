"""Run training and evaluation steps with the same code for every layout."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, check_number, check_switch
from .inputs import prepare
from .runtime import Batch, Objective, Part, Runtime, runtime_of

if TYPE_CHECKING:  # imported at runtime only for such a loss
    from .distillation import ModelTeacher
    from .user_loss import LossOfOutputs, LossOfScores


def train_step(
    model: nn.Module,
    batch: Batch | Sequence[Batch],
    loss_fn: "LossOfOutputs | None" = None,
    *,
    label_smoothing: float = 0.0,
    num_items_in_batch: float | Sequence[float] | None = None,
    score_loss: "LossOfScores | None" = None,
    temperature: float = 1.0,
    routes: Tensor | Sequence[Tensor] | None = None,
    teacher: "ModelTeacher | None" = None,
) -> Tensor:
    """Run forward and backward passes over this rank's batch, and add the gradients, reduced over ranks, to ``.grad``.

    The loss is the mean over *all* valid labels of the step, over all microbatches and all ranks, however the step is
    divided into microbatches. For a model that computes its own loss, it is the mean over all rows or all labels,
    whichever the model's loss averages over; ``print(plan)`` shows which. Losses that :class:`hfscale.RoutingConfig`
    adds are means over the tokens of the step; they are in the gradients, but not in the returned loss (see
    :func:`hfscale.expert_load`). Losses of layers that hfscale adds to the stock model, to predict further tokens, are
    in both.

    Args:
        batch: the keyword arguments of one forward pass, including ``labels``, or a list of such batches (gradient
            accumulation). Ranks that share a batch (tensor ranks) pass the same batch; see :func:`hfscale.batch_rank`.
            Every rank passes the same number of microbatches; a microbatch may have no rows. With pipeline stages, the
            list contains the microbatches of the schedule, and a single batch is split into ``num_microbatches`` along
            its rows.
        loss_fn: your own loss, for any model class: ``loss_fn(outputs, batch) -> (sum, count)``, called for each
            microbatch. ``outputs`` is the model's output without ``labels``, with full logits; ``batch`` contains all
            arguments of the microbatch, even arguments that the model does not accept. The step's loss is the total
            sum over the total count of all microbatches and distinct batches. ``loss_fn`` is called on the rank that
            has the head: with pipeline stages, the last stage. With stages, a batch may be split between any of its
            rows: if rows belong together in pairs, pass a list of microbatches.
        label_smoothing: fraction, 0 to 1, of every target's probability that is spread evenly over the vocabulary.
        num_items_in_batch: divisor of the sum over all valid labels of the step, the same on every rank; by default,
            the number of valid labels. Or a list with a divisor for each batch's sum: for batches of 10, 30, 20 and 20
            labels, ``[40, 120, 80, 80]`` gives the mean of the four means.
        score_loss: your own loss of log-probabilities and entropies: ``score_loss(scores, index)`` returns a scalar.
            ``scores`` holds these statistics of each token of a microbatch (:class:`hfscale.TokenScores`), ``index`` is
            the microbatch's index in the list. The step's loss is the sum over microbatches, averaged over the distinct
            batches. ``score_loss`` is called on the rank that has the head: with pipeline stages, the last stage.
        temperature: divisor of the logits for ``score_loss``.
        routes: the experts that each token is sent to, to repeat earlier routing decisions, one tensor for each batch:
            see :func:`hfscale.record_routes`.
        teacher: a :class:`hfscale.Teacher`; the loss of each label becomes the divergence from the teacher's
            distribution.

    Returns:
        the loss, a scalar without a graph, equal on every rank; 0 if the step has no valid label. With schedules
        without a flush, loss and gradients belong to an earlier batch: see :func:`drain`.
    """
    runtime = runtime_of(model)
    others = (loss_fn, score_loss, teacher)
    if others != (None, None, None) or (label_smoothing, temperature) != (0, 1):
        _check_losses(
            runtime, loss_fn, score_loss, label_smoothing, num_items_in_batch, temperature, teacher
        )
    if model is not runtime.model:  # PEFT's model, or a user's module around the model
        from .around import labels_around, refuse_loss_around, refuse_trained_around

        refuse_loss_around(runtime, model)
        refuse_trained_around(runtime, model)
        if num_items_in_batch is None:
            num_items_in_batch = labels_around(runtime, model, batch)
    if loss_fn is not None:
        from .user_loss import UserLoss

        return UserLoss(runtime, loss_fn).run(model, batch, train=True, routes=routes)
    if score_loss is not None:
        from .user_loss import train_by_scores

        return train_by_scores(runtime, model, batch, score_loss, temperature, routes)
    signals = None if teacher is None else teacher.signals(batch)
    microbatches, num_labels = prepare(runtime, batch, train=True, routes=routes)
    divisors = [num_labels] * len(microbatches)
    objective = _objective(runtime, divisors, num_items_in_batch, label_smoothing, teacher, signals)
    with runtime.around(Part.around_step, microbatches, True):
        return runtime.executor.run(model, microbatches, objective, backward=True)


def _check_losses(
    runtime: Runtime,
    loss_fn: Any,
    score_loss: Any,
    smoothing: float,
    items: Any,
    temperature: float,
    teacher: "ModelTeacher | None",
) -> None:
    """Raise :class:`ConfigError` if arguments of :func:`train_step` for different losses are combined, or if one has an
    invalid value.
    """
    if teacher is not None:
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
            f"temperature={temperature} has no effect without score_loss=, which was not passed: leave temperature "
            "out, or pass score_loss"
        )


def _check_teacher(runtime: Runtime, teacher: "ModelTeacher", other: bool) -> None:
    from .distillation import ModelTeacher
    from .user_loss import refuse_without_flush

    if not isinstance(teacher, ModelTeacher):
        raise ConfigError(
            f"teacher must be an hfscale.Teacher, got {type(teacher).__name__}: pass hfscale.Teacher(teacher, model)"
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

    With ``pipedream`` and ``pipedream_2bw``, a step returns the gradients of an earlier batch. So at the end of a run,
    updates are missing: with ``pipedream`` one less than there are pipeline ranks, with ``pipedream_2bw`` one. Take
    these updates in a loop like the training loop::

        for loss in hfscale.drain(model):
            hfscale.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    Yields:
        the next batch's loss, when its gradients are in ``.grad``, equally often on every rank. ``train_step`` and this
            loop together return the loss of each batch exactly once.
    """
    yield from runtime_of(model).executor.drain()


@torch.no_grad()
def eval_step(
    model: nn.Module,
    batch: Batch | Sequence[Batch],
    loss_fn: "LossOfOutputs | None" = None,
    *,
    label_smoothing: float = 0.0,
    num_items_in_batch: float | None = None,
    return_outputs: bool = False,
    teacher: "ModelTeacher | None" = None,
) -> Any:
    """Return the loss of a batch without computing gradients, normalized as in :func:`train_step`. The model's mode
    (training or evaluation) does not change. Losses of layers that hfscale adds to the stock model, to predict
    further tokens, are not included.

    Args:
        loss_fn, label_smoothing, num_items_in_batch, teacher: see :func:`train_step`.
        return_outputs: also return the model's outputs for this rank's batch.

    Returns:
        the loss, a scalar tensor; with ``return_outputs``, also the outputs: full tensors, under the stock model's
        names (``outputs.logits``), on every rank and stage. For a list of batches, a list of outputs is returned.
        Outputs are as large as in one process.
    """
    runtime = runtime_of(model)
    check_number("label_smoothing", label_smoothing, least=0, most=1)
    check_switch("return_outputs", return_outputs)
    if teacher is not None:
        _check_teacher(runtime, teacher, bool(loss_fn or label_smoothing))
    if loss_fn is not None and (label_smoothing or num_items_in_batch is not None):
        _refuse_beside("loss_fn", "label_smoothing and num_items_in_batch")
    kept = None
    if return_outputs:
        from .outputs import KeptOutputs

        kept = KeptOutputs(runtime)
    if loss_fn is not None:
        from .user_loss import UserLoss

        loss = UserLoss(runtime, loss_fn, kept).run(model, batch, train=False)
    else:
        if num_items_in_batch is None and model is not runtime.model:
            from .around import labels_around

            num_items_in_batch = labels_around(runtime, model, batch)
        signals = None if teacher is None else teacher.signals(batch)
        microbatches, num_labels = prepare(runtime, batch, train=False)
        divisors = [num_labels] * len(microbatches)
        objective = _objective(
            runtime, divisors, num_items_in_batch, label_smoothing, teacher, signals
        )
        objective = objective if kept is None else kept.recording(objective)
        loss = runtime.run_step(model, microbatches, objective, backward=False)
    if kept is None:
        return loss
    if isinstance(batch, Mapping):
        return loss, kept.of_own_rows([batch])[0]
    return loss, kept.of_own_rows(batch)


def _divisors(count: Tensor, asked: float | Sequence[float], microbatches: int) -> list[Tensor]:
    """Return the asked divisor of each microbatch's sum over labels; microbatches split from one batch share it."""
    given = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    if not given or microbatches % len(given):
        raise ConfigError(
            f"num_items_in_batch has {len(given)} numbers for a step of {microbatches} microbatches: pass one number "
            "for the step, or one for each microbatch"
        )
    values = [_divisor(batch, count, len(given) == 1) for batch in given]
    return [values[index * len(given) // microbatches] for index in range(microbatches)]


def _divisor(asked: Any, count: Tensor, alone: bool) -> Tensor:
    """Return ``asked``, an entry of ``num_items_in_batch``, as a tensor to divide by; 1 if it is 0.

    If it is the only entry (``alone``), it must not be 0 in a step with several labels: :class:`ConfigError` is raised.
    A number on a device is not read, to avoid waiting: an invalid number then gives NaN instead of an error.
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
            f"num_items_in_batch=0 does not fit a step of {int(count)} labels: pass the number of labels, or leave "
            "num_items_in_batch out"
        )
    return torch.full((), float(asked) or 1.0, device=count.device)


def _objective(
    runtime: Runtime,
    divisors: list[Tensor],
    num_items_in_batch: float | Sequence[float] | None,
    label_smoothing: float,
    teacher: "ModelTeacher | None",
    signals: Any,
) -> Objective:
    """Return the loss computation of a step: for each microbatch, the sum over its labels of the model's loss, or of
    the divergence from a teacher, divided by the microbatch's divisor. ``divisors`` are the number of the step's labels
    for each microbatch; ``num_items_in_batch`` takes their place.
    """
    if num_items_in_batch is not None:
        divisors = _divisors(divisors[0], num_items_in_batch, len(divisors))
    if teacher is not None:
        return teacher.objective(signals, divisors)
    loss = runtime.loss
    assert loss is not None  # checked as the step was prepared
    if label_smoothing:
        loss.check_smoothing(label_smoothing)
    return Objective(
        lambda model, batch, index: loss.loss_of(model, batch, divisors[index], label_smoothing)
    )


def batch_rank(model: nn.Module) -> int:
    """Return which of the distinct batches of a step this rank gets, as an index: ``0 <= batch_rank < batch_world``."""
    return runtime_of(model).mesh.batch_rank


def batch_world(model: nn.Module) -> int:
    """Return the number of distinct batches in a step. Ranks that get the same batch (tensor ranks, for example) have
    the same ``batch_rank``.
    """
    return runtime_of(model).mesh.batch_world


def metrics(model: nn.Module) -> dict[str, float]:
    """Return numbers about the training so far, for a log, the same on every rank, without communication.

    Under ``mixed_precision="fp16"``: ``loss_scale``; ``steps_since_loss_scale_changed``; ``skipped_steps``, the number
    of steps skipped because a gradient overflowed on some rank; ``step_was_skipped``, 1.0 if the last step was. With
    several ranks, from the 13th step on, medians over about a minute: ``step_seconds``, and ``work_seconds/rank_N``,
    which excludes rank N's waits for other ranks. Other options that are in use may add numbers
    (:meth:`hfscale.train.runtime.Part.metrics`). Otherwise the result is empty.
    """
    runtime = runtime_of(model)
    return {name: value for part in runtime.parts for name, value in part.metrics(runtime).items()}


def logged_metrics(model: nn.Module) -> dict[str, float]:
    """Return those numbers of :func:`metrics` that a trainer logs together with the loss."""
    runtime = runtime_of(model)
    logged = [part for part in runtime.parts if part.is_logged]
    return {name: value for part in logged for name, value in part.metrics(runtime).items()}
