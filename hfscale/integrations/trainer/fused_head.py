"""Support TRL's fused head over parallelized models: ``model(..., labels=, fused_lm_head=True)``.

Such a call returns *token scores* instead of logits: the log-probability of each label, the entropy at each position
and similar numbers. TRL's own fused head multiplies by ``lm_head.weight``, but a rank has only a shard of this weight,
or none of it. Scores are computed in three ways::

    a rank has all layers      the model's forward pass, whose loss scores tokens (with autograd graph)
    stages, no gradients       hfscale.token_scores: a collective call whose result is on all stages
    stages, a training step    record the calls in a :class:`Conversation`; the pipelined step computes the scores later

In a training step with stages, ``compute_loss`` runs unchanged, three times for each microbatch, but the trained model
runs only once::

    on every stage   record the model's arguments; other models (a reference) run now, on all stages together
    last stage       in the step, the loss of each microbatch from its scores and the other models' outputs
    on every stage   the same loss of the same scores again, for the metrics that the trainer records
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.torch import answer_calls
from ..._compat.trl import fused_output, loss_is_scaled, unrecorded
from ...distributed.ops.token_scores import TokenScores
from ...errors import ConfigError
from ...parallel.tensor.part import router_loss_counted_once, share_of_router_loss
from ...train.outputs import from_last_stage
from ...train.runtime import Runtime, runtime_of
from ...train.step import train_step
from ...train.user_loss import token_scores

_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_TRAINS = object()


@dataclass
class Conversation:
    """Record the model calls that the loss of one microbatch makes, in order. Only the call of the trained model has
    gradients; other calls are of a reference model, for example.
    """

    call: dict[str, Any] = field(default_factory=dict)  # the arguments of the trained model's call
    # The results of the other models' calls, in order, with a marker at the place of the trained model's call.
    answers: list[Any] = field(default_factory=list)
    # The result of the trained model's call; ``None`` until the step has computed it.
    scores: TokenScores | None = None
    place: int = 0  # number of calls so far


class FusedHead:
    """Intercept the calls of one model with ``fused_lm_head=True``: return log-probabilities of the labels, and the
    other numbers per token that ``outputs`` names (entropies, for example), instead of logits.
    """

    def __init__(
        self, model: nn.Module, temperature: float, outputs: tuple[str, ...], trains: bool
    ) -> None:
        self._runtime: Runtime = runtime_of(model)
        self.temperature = temperature
        self._outputs = {"log_probs", *outputs}
        self._trains = trains
        # The recorded calls of the current pipelined step, if any.
        self.conversation: Conversation | None = None
        answer_calls(self._runtime.model, self)

    def __call__(
        self,
        call: Any,
        *args: Any,
        fused_lm_head: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Replace a call of the model. With ``fused_lm_head``, return log-probabilities of the labels and similar
        numbers per token, or record the call for a pipelined step; otherwise run the model.
        """
        if not fused_lm_head:
            return call(*args, **kwargs)
        if self.conversation is not None:
            return self._in_conversation(self.conversation, kwargs)
        return self._answer(call, kwargs)

    def _answer(self, call: Any, kwargs: dict[str, Any]) -> Any:
        runtime = self._runtime
        if runtime.plan.stages is not None:
            if kwargs.get("output_router_logits"):
                raise ConfigError(
                    "the router loss is a sum over all layers, but each pipeline stage has only some of the layers: "
                    "use pp_size=1, or router_aux_loss_coef=0.0"
                )
            given = {name: value for name, value in kwargs.items() if value is not None}
            with runtime.executor.uncut():  # like in a step, so that equal models give equal scores
                return self.output(
                    token_scores(runtime.model, given, temperature=self.temperature), kwargs
                )
        assert runtime.loss is not None  # checked when the trainer was created
        with router_loss_counted_once(), runtime.loss.scoring(self.temperature) as scoring:
            answer = call(**{**kwargs, "use_cache": False})
        return self.output(scoring.scores, kwargs, answer)

    def output(
        self,
        scores: TokenScores,
        kwargs: dict[str, Any],
        answer: Any = None,
    ) -> Any:
        """Return ``scores``, the log-probabilities and other numbers per token, as the output of TRL's fused head,
        without the last position, which predicts no token.
        """
        shifted = kwargs.get("shift_labels")
        wanted: Tensor = kwargs["labels"] if shifted is None else shifted
        if shifted is None:
            # If a prompt is prepended to the rows, its tokens have scores, but no labels.
            front = scores.log_probs.shape[1] - wanted.shape[1]
            wanted = nn.functional.pad(wanted, (front, 0), value=-100)[:, 1:]
        scored = {
            name: getattr(scores, name)[:, : wanted.shape[1]]
            for name in _FIELDS
            if name in self._outputs
        }
        aux_loss = getattr(answer, "aux_loss", None)
        ranks = self._runtime.mesh.layout.tp
        if isinstance(aux_loss, Tensor):
            aux_loss = share_of_router_loss(aux_loss, ranks)
        others = {"loss": getattr(answer, "loss", None), "aux_loss": aux_loss}
        return fused_output(
            label_mask=(wanted != -100).to(scores.log_probs.device), **scored, **others
        )

    def _in_conversation(self, talk: Conversation, kwargs: dict[str, Any]) -> Any:
        talk.place += 1
        if talk.scores is not None:
            known = talk.answers[talk.place - 1]
            return self.output(talk.scores, kwargs) if known is _TRAINS else known
        if not torch.is_grad_enabled():
            talk.answers.append(self._answer(None, kwargs))
            return talk.answers[-1]
        if not self._trains or talk.call:
            raise ConfigError(
                "the loss of this trainer needs the gradients of several forward passes in a step, but with pipeline "
                "stages only one forward pass has gradients: use pp_size=1"
            )
        talk.answers.append(_TRAINS)
        talk.call = {name: value for name, value in kwargs.items() if value is not None}
        unknown = torch.zeros(kwargs["labels"].shape, device=kwargs["labels"].device)
        return self.output(TokenScores(unknown, unknown, unknown, unknown, unknown.bool()), kwargs)


def step_of_scores(
    trainer: Any, batches: Sequence[Any], count: Any, missing: int, heads: Sequence[FusedHead]
) -> Tensor:
    """Run forward and backward over a step's microbatches, and return the sum of their losses. An epoch's last step may
    have too few microbatches for the schedule: the ``missing`` ones repeat the last one, with a loss of 0.
    """
    model = trainer.model
    runtime = trainer.runtime
    share = (
        1.0 if loss_is_scaled(trainer, count) else 1.0 / trainer.current_gradient_accumulation_steps
    )
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
    # A step at the end of an epoch may have fewer microbatches than the schedule needs.
    train_step(
        model,
        calls + [calls[-1]] * missing,
        score_loss=score_loss,
        temperature=heads[0].temperature,
    )
    total = torch.zeros((), device=trainer.args.device)
    with torch.no_grad():
        for index, talk in enumerate(talks):
            own = dict(enumerate(kept[index].each())) if index in kept else {}
            talk.scores = TokenScores(*from_last_stage(runtime, [own])[0].values())
            total += loss_of(index).detach()
    return total
