"""Define losses that are averaged over all labels of a step, not of a microbatch, and the computation of a step's loss
from its microbatches.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..._compat.replaced import attribute_replaced
from ..._compat.transformers.classes import takes_argument
from ...errors import ConfigError
from ...plan.feature_plans import OwnLossPlan
from .batches import Microbatch

if TYPE_CHECKING:
    from ...distributed.ops.divergence import TaughtRows

_IGNORED = -100


class StepLoss(Protocol):
    """Define the interface of losses that are averaged over all labels of a step, not of each microbatch."""

    shift: int  # the number of positions by which labels are shifted against the logits
    # the gradient with which backward passes start (a loss scale), for losses that compute 16-bit gradients already in
    # the forward pass
    expected_gradient: float
    needs_labels: bool  # whether batches without ``labels`` are refused
    ignores: bool  # whether labels of -100 are ignored
    divides: bool  # whether the model's own code divides the loss by ``num_items_in_batch``

    def count_labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return two numbers as tensors on the microbatch's device, without waiting for it: its labels that count in
        the loss, and its labels outside of the vocabulary.
        """

    def check_smoothing(self, label_smoothing: float) -> None:
        """Raise :class:`ConfigError` if the loss does not support label smoothing."""

    def loss_of(
        self, model: nn.Module, batch: Microbatch, count: Tensor, label_smoothing: float
    ) -> Tensor:
        """Compute the loss of one microbatch: the sum over its labels, divided by ``count``, the number of valid labels
        of the whole step.
        """

    def scoring(self, temperature: float = 1.0, read: Any = None) -> AbstractContextManager[Any]:
        """Inside the ``with`` block, make forward passes compute statistics of each label's token (log-probability,
        entropy, ...; :class:`hfscale.TokenScores`), or apply the function ``read`` to the logits. The loss that forward
        passes return is then meaningless.
        """

    def distilling(self, teacher: "TaughtRows") -> AbstractContextManager[Any]:
        """Inside the ``with`` block, compute as the loss the divergence of the model's token distributions from those
        of ``teacher``.
        """

    def keeping_outputs(self) -> AbstractContextManager[list[Any]]:
        """Inside the ``with`` block, append the model's output of each microbatch to a list, which is the block's
        value; outputs have logits ``[b, s, V]``.
        """


class KeepsOutputs:
    """Let callers collect the outputs that the model returns while the loss is computed: a base class of losses."""

    _kept: list[Any] | None = None

    def keeping_outputs(self) -> AbstractContextManager[list[Any]]:
        """Inside the ``with`` block, append the model's output of each microbatch to a list, which is the block's
        value.
        """
        return attribute_replaced(self, "_kept", [])


class OwnLoss(KeepsOutputs):
    """Compute a step's loss from ``model(**batch).loss`` of each microbatch. The model returns a mean over rows, or
    over valid labels, so each microbatch is weighted by its number of rows or labels.
    """

    shift = 0
    expected_gradient = 1.0
    needs_labels = True

    def __init__(self, planned: OwnLossPlan, name: str) -> None:
        self._rows = planned.over == "rows"
        self._name = name
        self.ignores = planned.over == "labels"
        self.divides = planned.divides

    def count_labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the number of the microbatch's rows, or of its labels that are not ignored, whichever the model's loss
        averages over; and 0, because no labels are checked against a vocabulary.
        """
        labels: Tensor = batch["labels"]
        none = torch.zeros((), dtype=torch.int64, device=labels.device)
        return (none + len(labels) if self._rows else (labels != _IGNORED).sum()), none

    def check_smoothing(self, label_smoothing: float) -> None:
        """Raise :class:`ConfigError`: label smoothing is not supported, because the model computes its loss itself."""
        raise ConfigError(
            f"label_smoothing={label_smoothing} needs a loss over a vocabulary, but {self._name} computes its "
            "own loss: leave it out, or smooth labels in a plain loop"
        )

    def loss_of(
        self, model: nn.Module, batch: Microbatch, count: Tensor, label_smoothing: float
    ) -> Tensor:
        """Compute the loss of one microbatch: the model's mean, times the microbatch's number of rows or labels,
        divided by ``count``, the number in the whole step.
        """
        loss: Tensor
        valid = self.count_labels(batch)[0] if batch.valid is None else batch.valid
        if not valid:  # the mean over no labels is NaN
            # Derived from labels.
            kept = "decoder_input_ids" not in batch and takes_argument(model, "decoder_input_ids")
            given = {name: value for name, value in batch.items() if kept or name != "labels"}
            with batch.kept_apart():
                output = model(**given)
            scores = output[1 if kept else 0]  # after the loss, if the output contains one
            loss = 0.0 * scores.float().sum()
        else:
            with batch.kept_apart():
                output = model(**batch)
            loss = (output[0] if isinstance(output, tuple) else output.loss) * valid / count
            scores = output[1] if len(output) > 1 else loss
        if self._kept is not None:
            self._kept.append(output)
        # All ranks sum their losses, so the dtype must not depend on whether a rank has labels.
        return loss.to(
            torch.float64 if getattr(scores, "dtype", None) == torch.float64 else torch.float32
        )

    def scoring(self, *_: Any, **__: Any) -> AbstractContextManager[Any]:
        """Raise :class:`ConfigError`, because log-probabilities of tokens, and distillation, need the loss of a causal
        language model.
        """
        raise ConfigError(
            f"hfscale.token_scores, score_loss and distillation need a causal language model's loss, but {self._name} "
            "has another loss: use a causal language model"
        )

    distilling = scoring


@dataclass(frozen=True)
class Objective:
    """Compute the loss of each microbatch of a step, on the rank that has the head; the step's loss is their sum."""

    # ``loss(model, microbatch, index)``, scaled so that the step's loss is the sum over microbatches
    loss: Callable[[Any, Microbatch, int], Tensor]
    # Whether the backward pass recomputes layers, so that weight gradients cannot be deferred.
    recomputes: bool = False
