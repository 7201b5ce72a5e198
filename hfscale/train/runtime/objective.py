"""Define losses that can be normalized for a whole step, and the objective of its microbatches."""

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
    """Compute a loss that can be normalized for a whole step."""

    shift: int  # the number of positions by which labels are shifted against the logits
    # the gradient with which backward passes start (a loss scale), for losses that compute 16-bit gradients already in
    # the forward pass
    expected_gradient: float
    needs_labels: bool  # whether batches without ``labels`` are refused
    ignores: bool  # whether labels of -100 are ignored
    divides: bool  # whether the model's own code divides the loss by ``num_items_in_batch``

    def count_labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Count a microbatch's labels in the loss, and those outside the vocabulary, on its device, without waiting."""

    def check_smoothing(self, label_smoothing: float) -> None:
        """Raise :class:`ConfigError` if the loss does not support label smoothing."""

    def loss_of(
        self, model: nn.Module, batch: Microbatch, count: Tensor, label_smoothing: float
    ) -> Tensor:
        """Compute the loss of one microbatch, scaled for a step with ``count`` valid labels."""

    def scoring(self, temperature: float = 1.0, read: Any = None) -> AbstractContextManager[Any]:
        """Let forward passes inside the ``with`` block compute token scores, or apply ``read`` to lazy logits; the loss
        that they return is meaningless.
        """

    def distilling(self, teacher: "TaughtRows") -> AbstractContextManager[Any]:
        """Compute the divergence from a teacher as the loss inside the ``with`` block."""

    def keeping_outputs(self) -> AbstractContextManager[list[Any]]:
        """Append the model's output of each microbatch in the `with` block to the list, with logits ``[b, s, V]``."""


class KeepsOutputs:
    """Record the model's outputs on request: a base class of losses."""

    _kept: list[Any] | None = None

    def keeping_outputs(self) -> AbstractContextManager[list[Any]]:
        """Record the model's outputs inside the `with` block: see :meth:`StepLoss.keeping_outputs`."""
        return attribute_replaced(self, "_kept", [])


class OwnLoss(KeepsOutputs):
    """Use the model's ``model(**batch).loss``, a mean over rows or valid labels, weighted by their number."""

    shift = 0
    expected_gradient = 1.0
    needs_labels = True

    def __init__(self, planned: OwnLossPlan, name: str) -> None:
        self._rows = planned.over == "rows"
        self._name = name
        self.ignores = planned.over == "labels"
        self.divides = planned.divides

    def count_labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Count the rows, or the labels that are not ignored."""
        labels: Tensor = batch["labels"]
        none = torch.zeros((), dtype=torch.int64, device=labels.device)
        return (none + len(labels) if self._rows else (labels != _IGNORED).sum()), none

    def check_smoothing(self, label_smoothing: float) -> None:
        """Raise :class:`ConfigError` for label smoothing, because the loss is computed inside the model."""
        raise ConfigError(
            f"label_smoothing={label_smoothing} needs a loss over a vocabulary, but {self._name} computes its "
            "own loss: leave it out, or smooth labels in a plain loop"
        )

    def loss_of(
        self, model: nn.Module, batch: Microbatch, count: Tensor, label_smoothing: float
    ) -> Tensor:
        """Compute the loss of one microbatch, scaled for a step with ``count`` rows or labels."""
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
        """Raise :class:`ConfigError`: token scores and distillation are defined only for causal language models."""
        raise ConfigError(
            f"token scores and distillation need a causal language model's loss, but {self._name} has another loss: "
            "use a causal language model"
        )

    distilling = scoring


@dataclass(frozen=True)
class Objective:
    """Compute the loss of a step's microbatches, on the rank that has the head."""

    # ``loss(model, microbatch, index)``, scaled so that the step's loss is the sum over microbatches
    loss: Callable[[Any, Microbatch, int], Tensor]
    # Whether the backward pass recomputes layers, so that weight gradients cannot be deferred.
    recomputes: bool = False
