"""Run a step of a trainer's own loss through pipeline stages.

``compute_loss`` runs unchanged, three times for each microbatch; the trained model runs once::

    on every stage   record the model's arguments; other models (a reference) run now, on all stages together
    last stage       in the step, the loss of each microbatch from its scores and the other models' outputs
    on every stage   the same loss of the same scores again, for the metrics that the trainer records
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat.trl import loss_is_scaled, unrecorded
from ...distributed.ops.token_scores import TokenScores
from ...train import train_step
from ...train.outputs import from_last_stage
from .fused_head import Conversation, FusedHead


def training_step(trainer: Any, batches: Sequence[Any], count: Any, missing: int, heads: Sequence[FusedHead]) -> Tensor:
    """Run forward and backward over all microbatches of a step.

    Args:
        count: Trainer's ``num_items_in_batch``.
        missing: how many microbatches the step is short of a full one.
        heads: fused heads of all models that the loss calls.

    Returns:
        the sum of this distinct batch's losses.
    """
    model, runtime = trainer.model, trainer.runtime
    share = 1.0 if loss_is_scaled(trainer, count) else 1.0 / trainer.current_gradient_accumulation_steps
    talks = [Conversation() for _ in batches]

    def loss_of(index: int) -> Tensor:
        talks[index].place = 0
        for head in heads:
            head.conversation = talks[index]
        try:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, dict(batches[index]), num_items_in_batch=count)
        finally:
            for head in heads:
                head.conversation = None
        return loss * share  # type: ignore[no-any-return]

    def score_loss(scores: TokenScores, index: int) -> Tensor:
        if index >= len(batches):
            return scores.log_probs.sum() * 0
        kept[index], talks[index].scores = scores, scores
        with unrecorded(trainer):
            return loss_of(index)

    for index in range(len(batches)):
        with unrecorded(trainer):
            loss_of(index)
    calls = [talk.call for talk in talks]
    kept: dict[int, TokenScores] = {}
    # A step at the end of an epoch may be short of microbatches that the schedule needs.
    train_step(model, calls + [calls[-1]] * missing, score_loss=score_loss, temperature=heads[0].temperature)
    total = torch.zeros((), device=trainer.args.device)
    with torch.no_grad():
        for index, talk in enumerate(talks):
            own = dict(enumerate(kept[index].each())) if index in kept else {}
            talk.scores = TokenScores(*from_last_stage(runtime, [own])[0].values())
            total += loss_of(index).detach()
    return total
