"""Run steps with users' losses: ``score_loss``, a function of tokens' log-probabilities and entropies, which is
averaged over batches; and ``loss_fn``, a function of the model's outputs that returns a sum and a count.

The count of the whole step, by which the sum of ``loss_fn`` is divided, is known only after the last microbatch of the
last rank. Gradients are linear in the loss, so a step runs the backward pass of the sums, and divides gradients and
loss afterwards::

    microbatch --model, without labels--> outputs --loss_fn--> (sum, count)
    sums --backward, reductions of every axis--> .grad --divided by the count of the whole step--> .grad
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._compat.torch import tree_leaves
from .._compat.transformers.classes import class_name
from ..config.parallel import UNCUT_SEQUENCES
from ..distributed.ops.token_scores import TokenScores
from ..errors import ConfigError, check_number
from ..plan.feature_plans import ROUTES
from .inputs import has_rows, prepare
from .outputs import KeptOutputs, from_last_stage
from .packed_rows.facts import LENGTHS
from .runtime import Batch, Objective, Runtime, local_tensor, runtime_of
from .runtime.batches import Microbatch
from .runtime.shards import gradients_aside
from .runtime.writing import sum_or_raise

Value = TypeVar("Value")
LossOfScores = Callable[[TokenScores, int], Tensor]
"""A user's loss of one microbatch, a scalar, computed from statistics of its tokens and from its index in the step."""
LossOfOutputs = Callable[[Any, Mapping[str, Any]], tuple[Tensor, Tensor | float]]
"""A user's loss of one microbatch, computed from the model's outputs and the microbatch: the sum of its losses, and
their number.
"""
_LABELS = ("labels", "shift_labels", "num_items_in_batch")


class UserFunction:
    """Call a user's function such that an exception on one rank does not leave other ranks waiting: the rank continues
    with a value that has no effect, and all ranks raise at the end of the step.

    Raises:
        ConfigError: when the object is created, if the function cannot be called with ``arguments``.
    """

    def __init__(
        self, runtime: Runtime, name: str, function: Any, arguments: tuple[str, ...]
    ) -> None:
        if not callable(function) or not _takes(function, len(arguments)):
            raise ConfigError(
                f"{name}={function!r} is invalid: pass a function that takes {' and '.join(arguments)}"
            )
        self.name = name
        self._runtime = runtime
        self._function = function
        self._error: Exception | None = None

    def __call__(
        self,
        read: Callable[[Any], Value],
        *args: Any,
        instead: Value,
    ) -> Value:
        """Call the user's function with ``args``, and return what ``read`` makes of the result. If the function or
        ``read`` raises, remember the exception and return ``instead``.
        """
        try:
            return read(self._function(*args))
        except Exception as error:  # of any type: it is raised in `agree`
            self._error = self._error or error
            return instead

    def agree(self) -> None:
        """Raise on every rank if the user's function has failed on any rank since the step began; collective."""
        elsewhere = f"{self.name} failed on {{}} other rank(s): see their error"
        sum_or_raise((), self._runtime.mesh.control, self._error, elsewhere)

    def scalar(self, value: Any, what: str) -> Tensor:
        """Return the user's loss as a tensor without dims. Raise :class:`ConfigError` unless it is a floating-point
        tensor of one number; ``what`` names it in the error.
        """
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            given = (
                f"{list(value.shape)} of {value.dtype}"
                if isinstance(value, Tensor)
                else repr(value)[:60]
            )
            raise ConfigError(
                f"{self.name} must return {what} as a tensor of one number, got {given}: use .sum()"
            )
        return value.reshape(())


def refuse_without_flush(runtime: Runtime, loss: str) -> None:
    """Raise :class:`ConfigError` for a user's loss (named ``loss``) under a pipeline schedule without a flush, because
    its microbatches end in later steps.
    """
    layout = runtime.mesh.layout
    if runtime.plan.stages is not None and not layout.flushes:
        raise ConfigError(
            f"pipeline_schedule {layout.pipeline_schedule} cannot be used with {loss}, because under this schedule "
            "some microbatches of a batch end in a later step: use '1f1b' or 'zbv'"
        )


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # compiled functions may have no signature
    return True


def token_scores(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    routes: Tensor | None = None,
) -> TokenScores:
    """Return statistics of the tokens of a batch, such as the log-probability of each token and the entropy of its
    distribution (:class:`hfscale.TokenScores`), in any layout, without full logits.

    They are computed from shards of the vocabulary, a chunk of tokens at a time. Without pipeline stages, ``log_probs``
    and ``entropy`` have gradients, so a loss made of them supports ``loss.backward()`` like ``model(**batch).loss``.
    With stages, every rank gets the statistics without gradients. To train with stages, pass ``score_loss`` to
    :func:`hfscale.train_step`, which computes the same statistics on the last stage.

    Args:
        batch: the keyword arguments of one forward pass; ``labels`` (or ``shift_labels``) select the tokens to score,
            by default all attended tokens. Ranks that share a batch pass the same batch.
        temperature: divisor of the logits.
        routes: the experts that each token is sent to, to repeat earlier routing decisions: see
            :func:`hfscale.record_routes`.

    Returns:
        statistics of this rank's batch, ``[b, s]`` each. Position ``i`` scores the token at ``i + 1``; with
            ``shift_labels``, the label at ``i``.

    Raises:
        ConfigError: in the same cases as :func:`hfscale.train_step`.
    """
    runtime = runtime_of(model)
    check_number("temperature", temperature, above=0)
    microbatches, count = prepare(runtime, _with_labels(batch), train=False, routes=routes)
    kept: dict[int, TokenScores] = {}

    def keep(called: Any, microbatch: Microbatch, index: int) -> Tensor:
        kept[index] = _scores(runtime, called, microbatch, count, temperature)
        return kept[index].log_probs.sum() * 0

    rows = slice(None) if has_rows(batch) else slice(0)  # not those of padding in their place
    if torch.is_grad_enabled() and runtime.plan.stages is None:
        own = _scores(runtime, model, microbatches[0], count, temperature)
        return TokenScores(*(each[rows] for each in own.each()))
    with torch.no_grad():
        runtime.run_step(model, microbatches, Objective(keep), backward=False)
    parts = [kept[index].each() for index in sorted(kept)]
    joined = dict(enumerate(torch.cat(each)[rows] for each in zip(*parts, strict=True)))
    return TokenScores(*from_last_stage(runtime, [joined])[0].values())


def train_by_scores(
    runtime: Runtime,
    model: nn.Module,
    batch: Any,
    score_loss: LossOfScores,
    temperature: float,
    routes: Any,
) -> Tensor:
    """Run a training step with a user's ``score_loss``, and return the mean of the loss over distinct batches. Raise
    :class:`ConfigError` if the schedule would split a given batch into microbatches, or has no flush.
    """
    user = UserFunction(runtime, "score_loss", score_loss, ("scores", "index"))
    microbatches, count = prepare(runtime, batch, train=True, routes=routes)
    refuse_without_flush(runtime, "score_loss")
    given = 1 if isinstance(batch, Mapping) else len(batch)
    if given != (passes := len(microbatches)):
        raise ConfigError(
            f"score_loss must get each of the {given} given batch(es) whole, but the schedule would split them into "
            f"{passes} microbatches: pass a list of microbatches whose length the schedule takes, and leave "
            "num_microbatches out"
        )

    def read(found: Any) -> Tensor:
        total = user.scalar(found, "a microbatch's loss")
        if not total.requires_grad:
            raise ConfigError(
                "score_loss returned a loss without a graph, so nothing would be trained: make it of the scores, "
                "without .detach()"
            )
        return total

    def loss(called: Any, microbatch: Microbatch, index: int) -> Tensor:
        scores = _scores(runtime, called, microbatch, count, temperature)
        return (
            user(read, scores, index, instead=0.0 * scores.log_probs.sum())
            / runtime.mesh.data_world
        )

    total = runtime.run_step(model, microbatches, Objective(loss, recomputes=True), backward=True)
    user.agree()
    return total


def _scores(
    runtime: Runtime, called: Any, batch: Microbatch, count: Tensor, temperature: float
) -> TokenScores:
    """Run one forward pass, and return the statistics (log-probability, entropy, ...) of all tokens of its sequences,
    gathered over context ranks.
    """
    assert runtime.loss is not None  # checked as the step was prepared
    with runtime.loss.scoring(temperature) as scoring:
        runtime.loss.loss_of(called, batch, count, 0.0)
    own = list(scoring.scores.each())
    # Not all backends can send booleans.
    sent = (score.to(torch.uint8) if score.dtype == torch.bool else score for score in own)
    return TokenScores(
        *(
            runtime.context.gather_tokens(batch, s).to(o.dtype)
            for s, o in zip(sent, own, strict=True)
        )
    )


def _with_labels(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"token_scores takes one batch (a mapping of names to tensors), got a {type(batch).__name__}: call it once "
            "for each batch"
        )
    if batch.get("labels") is not None or "input_ids" not in batch:
        return batch
    labels = batch.get("shift_labels")
    mask = batch.get("attention_mask")
    if labels is None:
        labels = batch["input_ids"]
        if isinstance(labels, Tensor) and isinstance(mask, Tensor) and mask.shape == labels.shape:
            labels = labels.masked_fill(mask == 0, -100)
    return {**batch, "labels": labels}


class _Rows:
    """Stand in for the loss while a step with a user's ``loss_fn`` is prepared, since no labels are needed: a batch's
    rows are counted instead of labels. Implements :class:`hfscale.train.runtime.StepLoss`.
    """

    shift = 0
    expected_gradient = 1.0
    needs_labels = False
    ignores = False
    divides = False

    def count_labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the number of rows of a batch's first tensor that has rows; and 0, because no labels are checked."""
        labels = next(
            (value for value in batch.values() if isinstance(value, Tensor) and value.ndim), None
        )
        if labels is None:
            raise ConfigError(
                f"a batch must have a tensor with a row for each sample, got only {', '.join(batch)}: add one, such as "
                "input_ids"
            )
        none = torch.zeros((), dtype=torch.int64, device=labels.device)
        return none + len(labels), none


class UserLoss:
    """Run steps with a user's ``loss_fn``. ``kept`` collects the model's outputs, if the caller asked for them."""

    def __init__(
        self, runtime: Runtime, loss_fn: LossOfOutputs, kept: KeptOutputs | None = None
    ) -> None:
        self._loss_fn = UserFunction(runtime, "loss_fn", loss_fn, ("outputs", "batch"))
        self._runtime = runtime
        self._kept = kept
        self._given: Sequence[Microbatch] = ()
        self._counts: list[Tensor] = []
        forward, takes_more = runtime.forward_arguments
        self._taken = {ROUTES, *forward, *(LENGTHS if takes_more else ())} - set(_LABELS)

    def run(
        self,
        model: nn.Module,
        batch: Batch | Sequence[Batch],
        train: bool,
        routes: Any = None,
    ) -> Tensor:
        """Run one step with the user's loss, and return the step's loss, the same on every rank. Raise
        :class:`ConfigError` if the pipeline schedule has no flush, or if context ranks share rows that begin with a
        trained prompt.
        """
        runtime = self._runtime
        refuse_without_flush(runtime, "loss_fn")
        prompted = runtime.prompt is not None and runtime.prompt.tokens > 0
        if prompted and runtime.mesh.layout.cuts_sequences:
            raise ConfigError(
                "loss_fn needs rows whose tokens are on one rank if an adapter adds a prompt before them, got "
                f"{runtime.mesh.layout.describe()}, where ranks share a row and its prompt: leave loss_fn out, or use "
                f"{UNCUT_SEQUENCES}"
            )
        rows: Any = _Rows()
        self._given, _ = prepare(runtime, batch, train, rows, routes)
        inputs = [
            each.like({name: each[name] for name in each if name in self._taken})
            for each in self._given
        ]
        parameters = list(runtime.around_it.parameters()) if train else []
        with torch.set_grad_enabled(train), gradients_aside(parameters):
            total = runtime.run_step(model, inputs, Objective(self._loss), train)
            self._loss_fn.agree()
            none = torch.zeros((), dtype=torch.float64, device=runtime.mesh.device)
            count = runtime.sum_of_shares(
                none + torch.stack(self._counts).sum() if self._counts else none
            )
            count = torch.where(count == 0, torch.ones_like(count), count)
            for made in (
                local_tensor(parameter.grad)
                for parameter in parameters
                if parameter.grad is not None
            ):
                made.div_(count.to(made.device, made.dtype))
        self._given = ()
        self._counts = []
        return (total / count).to(total.dtype)

    def _loss(self, called: Any, inputs: Microbatch, index: int) -> Tensor:
        with inputs.kept_apart():
            output = called(**inputs)
        if self._kept is not None:
            self._kept.keep(output, inputs, index)
        nothing: tuple[Tensor | None, Tensor | float] = (None, 0.0)
        total, count = self._loss_fn(self._read, output, self._own(index), instead=nothing)
        counted = torch.as_tensor(count, dtype=torch.float64).detach()
        self._counts.append(counted.to(self._runtime.mesh.device, non_blocking=True))
        if total is not None and (total.requires_grad or not torch.is_grad_enabled()):
            return total
        leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        first = next(
            leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()
        )
        return 0.0 * first.sum()  # this microbatch has no loss, but its backward pass needs a graph

    def _own(self, index: int) -> Microbatch:
        """Return a microbatch as the user passed it, without the tokens of a trained prompt that hfscale has added in
        front of each row.
        """
        given = self._given[index]
        if self._runtime.prompt is None:
            return given
        own = self._runtime.prompt.without(given)
        return given if own is given else given.like(own)

    def _read(self, found: Any) -> tuple[Tensor | None, Tensor | float]:
        """Check what ``loss_fn`` returned, and return its sum and its count. A sum that is the number 0 is returned as
        ``None``.
        """
        if not isinstance(found, tuple) or len(found) != 2:
            raise ConfigError(
                f"loss_fn must return a tuple of two, got a {type(found).__name__} for "
                f"{class_name(self._runtime.model)}: return the sum of the microbatch's losses, and their number"
            )
        total, count = found
        if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
            count = count.reshape(())
        if not isinstance(count, Tensor) or count.device.type == "cpu":  # avoids a device sync
            number = count.item() if isinstance(count, Tensor) and not count.ndim else count
            check_number("count (the second value that loss_fn returns)", number, least=0)
        if isinstance(total, int | float) and not total:
            return None, count
        total = self._loss_fn.scalar(total, "the sum of the microbatch's losses")
        if torch.is_grad_enabled() and not total.requires_grad and count and total:
            raise ConfigError(
                "loss_fn returned a sum without a graph, so nothing would be trained: make it of the outputs, without "
                ".detach(), .item() or torch.no_grad()"
            )
        return total, count
