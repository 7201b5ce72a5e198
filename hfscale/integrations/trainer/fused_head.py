"""TRL's fused head over parallelized models: ``model(..., labels=, fused_lm_head=True)`` returns token scores.

TRL's own multiplies by ``lm_head.weight``, of which a rank has a shard, or nothing. There are three ways to compute the
scores::

    a rank has all layers      the model's forward pass, whose loss scores tokens (with autograd graph)
    stages, no gradients       hfscale.token_scores: a collective call whose result is on all stages
    stages, a training step    record the calls in a :class:`Conversation`; the pipelined step computes the scores later
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.torch import answer_calls
from ..._compat.trl import fused_output
from ...distributed.ops.token_scores import TokenScores
from ...errors import ConfigError
from ...parallel.tensor import router_loss_counted_once, share_of_router_loss
from ...train import token_scores
from ...train.runtime import Runtime, runtime_of

_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


_TRAINS = object()


@dataclass
class Conversation:
    """The model calls that one microbatch's loss makes, in order; exactly one, of the trained model, has gradients.

    Attributes:
        call: the arguments of that call.
        answers: results of the other calls, in order, with a marker in the place of that one.
        scores: the result of that call; ``None`` until the step has computed it.
        place: how many calls have been made.
    """

    call: dict[str, Any] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)
    scores: TokenScores | None = None
    place: int = 0


class FusedHead:
    """The fused head of one model.

    Args:
        runtime: the model's.
        temperature: divisor of the logits.
        outputs: which scores are wanted.
        trains: whether it is the model that is trained.

    Attributes:
        temperature: the same.
        conversation: the recorded calls of the current pipelined step, if any.
    """

    def __init__(self, runtime: Runtime, temperature: float, outputs: tuple[str, ...], trains: bool) -> None:
        self._runtime, self.temperature, self._outputs = runtime, temperature, {"log_probs", *outputs}
        self._trains = trains
        self.conversation: Conversation | None = None

    def install(self) -> None:
        """Intercept the model's calls."""
        answer_calls(self._runtime.model, self)

    def __call__(self, call: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """Handle a call of the model in its place."""
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
                    "the router loss is a sum over layers, of which each stage has only some: use pp_size=1, or "
                    "router_aux_loss_coef=0.0"
                )
            given = {name: value for name, value in kwargs.items() if value is not None}
            with runtime.executor.uncut():  # as in a step, so that equal models give equal scores
                return self.output(token_scores(runtime.model, given, temperature=self.temperature), kwargs)
        assert runtime.loss is not None  # checked as the trainer was made
        with router_loss_counted_once(), runtime.loss.scoring(self.temperature) as scoring:
            answer = call(**{**kwargs, "use_cache": False})
        return self.output(scoring.scores, kwargs, answer)

    def output(self, scores: TokenScores, kwargs: dict[str, Any], answer: Any = None) -> Any:
        """Return scores in TRL's form: without the last position, which predicts nothing."""
        shifted = kwargs.get("shift_labels")
        wanted: Tensor = kwargs["labels"][:, 1:] if shifted is None else shifted
        found = {name: getattr(scores, name)[:, : wanted.shape[1]] for name in _FIELDS if name in self._outputs}
        aux_loss, ranks = getattr(answer, "aux_loss", None), self._runtime.mesh.layout.tp
        if isinstance(aux_loss, Tensor):
            aux_loss = share_of_router_loss(aux_loss, ranks)
        others = {"loss": getattr(answer, "loss", None), "aux_loss": aux_loss}
        return fused_output(label_mask=(wanted != -100).to(scores.log_probs.device), **found, **others)

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
                "this loss needs the gradients of several forward passes, and pipeline stages run one: use pp_size=1"
            )
        talk.answers.append(_TRAINS)
        talk.call = {name: value for name, value in kwargs.items() if value is not None}
        return self.output(_unknown(kwargs["labels"]), kwargs)


def _unknown(labels: Tensor) -> TokenScores:
    zero = torch.zeros(labels.shape, device=labels.device)
    return TokenScores(zero, zero, zero, zero, zero.bool())


def fused_head(model: nn.Module, temperature: float, outputs: tuple[str, ...], trains: bool) -> FusedHead:
    """Return a fused head that is installed into the model."""
    head = FusedHead(runtime_of(model), temperature, outputs, trains)
    head.install()
    return head
