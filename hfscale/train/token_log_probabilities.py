"""Compute log-probabilities and entropies of every token, for users' and TRL's losses."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.ops.token_scores import TokenScores
from ..errors import ConfigError, check_number
from .inputs import prepare
from .outputs import from_last_stage
from .runtime import Objective, Runtime, runtime_of
from .runtime.batches import Microbatch
from .user_loss import UserFunction, refuse_without_flush

LossOfScores = Callable[[TokenScores, int], Tensor]
"""Compute the loss of a microbatch, a scalar, from its scores and its index in the step."""


def token_scores(
    model: nn.Module, batch: Mapping[str, Any], *, temperature: float = 1.0, routes: Tensor | None = None
) -> TokenScores:
    """Return log-probability, entropy and the like of every token of a batch, in any layout, without full logits.

    They are computed from shards of the vocabulary, a chunk of tokens at a time. Without pipeline stages ``log_probs``
    and ``entropy`` have gradients, so a loss of them may run backward like ``model(**batch).loss``. With stages every
    rank gets the scores without gradients: train with ``hfscale.train_step(model, batch, score_loss=...)``, which has
    the same scores on the last stage.

    Args:
        batch: the keyword arguments of one forward pass; ``labels`` (or ``shift_labels``) say which tokens are scored,
            by default all that are attended to. Ranks that share a batch pass the same one.
        temperature: divisor of the logits.
        routes: the experts of every token: see :func:`hfscale.record_routes`.

    Returns:
        scores of this rank's batch, ``[b, s]`` each. Position ``i`` scores the token at ``i + 1``; with
        ``shift_labels``, the label at ``i``.

    Raises:
        ConfigError: as :func:`hfscale.train_step`.
    """
    runtime = runtime_of(model)
    check_number("temperature", temperature, above=0)
    microbatches, count = prepare(runtime, _with_labels(batch), train=False, routes=routes)
    kept: dict[int, TokenScores] = {}

    def keep(called: Any, microbatch: Microbatch, index: int) -> Tensor:
        kept[index] = _scores(runtime, called, microbatch, count, temperature)
        return kept[index].log_probs.sum() * 0

    if torch.is_grad_enabled() and runtime.plan.stages is None:
        return _scores(runtime, model, microbatches[0], count, temperature)
    with torch.no_grad():
        runtime.run_step(model, microbatches, Objective(keep), backward=False)
    parts = [kept[index].each() for index in sorted(kept)]
    joined = dict(enumerate(torch.cat(each) for each in zip(*parts, strict=True)))
    return TokenScores(*from_last_stage(runtime, [joined])[0].values())


def loss_of_scores(
    runtime: Runtime, count: Tensor, score_loss: UserFunction, temperature: float, batch: Any, passes: int
) -> Objective:
    """Return the objective of a user's ``score_loss``: its mean over distinct batches, microbatch by microbatch. Refuse
    schedules without a flush, and numbers of microbatches that differ: those of ``batch``, and ``passes`` of the model.
    """
    refuse_without_flush(runtime, "score_loss")
    given = 1 if isinstance(batch, Mapping) else len(batch)
    if given != passes:
        raise ConfigError(
            f"score_loss needs the {given} given batch(es) uncut, and the schedule would cut them into {passes} "
            "microbatches: pass a list of microbatches whose length the schedule takes, and leave num_microbatches "
            "out"
        )

    def read(found: Any) -> Tensor:
        total = score_loss.scalar(found, "a microbatch's loss")
        if not total.requires_grad:
            raise ConfigError("score_loss returned a loss without a graph: make it of the scores, without .detach()")
        return total

    def loss(called: Any, microbatch: Microbatch, index: int) -> Tensor:
        scores = _scores(runtime, called, microbatch, count, temperature)
        return score_loss(read, scores, index, instead=0.0 * scores.log_probs.sum()) / runtime.mesh.data_world

    return Objective(loss, recomputes=True)


def _scores(runtime: Runtime, called: Any, batch: Microbatch, count: Tensor, temperature: float) -> TokenScores:
    """Return the scores of one forward pass, for all tokens of its sequences."""
    assert runtime.loss is not None  # checked as the step was prepared
    with runtime.loss.scoring(temperature) as scoring:
        runtime.loss.of(called, batch, count, 0.0)
    return TokenScores(*(_of_all_tokens(runtime, batch, each) for each in scoring.scores.each()))


def _of_all_tokens(runtime: Runtime, batch: Microbatch, own: Tensor) -> Tensor:
    flags = own.dtype == torch.bool  # not every backend can send booleans
    whole = own.to(torch.uint8) if flags else own
    whole = runtime.context.gather_tokens(batch, whole)
    return whole.bool() if flags else whole


def _with_labels(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise ConfigError(f"token_scores takes one batch, a mapping of tensors, and found a {type(batch).__name__}")
    if batch.get("labels") is not None or "input_ids" not in batch:
        return batch
    labels, mask = batch.get("shift_labels"), batch.get("attention_mask")
    if labels is None:
        labels = batch["input_ids"]
        if isinstance(labels, Tensor) and isinstance(mask, Tensor) and mask.shape == labels.shape:
            labels = labels.masked_fill(mask == 0, -100)
    return {**batch, "labels": labels}
