"""A loss that a model's own code computes, normalized for a whole step."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.classes import class_name, takes_argument
from ...errors import ConfigError
from ...plan.own_loss import OwnLossPlan
from .batches import Microbatch
from .local_weights import LocalWeights
from .objective import KeepsOutputs
from .runtime import Part, Runtime

_IGNORED = -100


class OwnLoss(KeepsOutputs):
    """The model's ``model(**batch).loss``, a mean over rows or over valid labels, weighted by their number.

    Implements :class:`.objective.StepLoss`.
    """

    shift = 0
    expected_gradient = 1.0
    needs_labels = True

    def __init__(self, planned: OwnLossPlan, name: str) -> None:
        self._rows, self._name = planned.over == "rows", name
        self.ignores, self.divides = planned.over == "labels", planned.divides

    def look(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Count the rows, or the labels that are not ignored."""
        labels: Tensor = batch["labels"]
        none = torch.zeros((), dtype=torch.int64, device=labels.device)
        return (none + len(labels) if self._rows else (labels != _IGNORED).sum()), none

    def check_smoothing(self, label_smoothing: float) -> None:
        """Refuse label smoothing: the loss is computed inside the model."""
        if label_smoothing:
            raise ConfigError(
                f"label_smoothing={label_smoothing} is of losses over a vocabulary, and {self._name} takes its own: "
                "leave it out, or smooth labels in a plain loop"
            )

    def of(self, model: nn.Module, batch: Microbatch, count: Tensor, label_smoothing: float) -> Tensor:
        """Compute the loss of one microbatch, scaled for a step with ``count`` rows or labels."""
        loss: Tensor
        valid = self.look(batch)[0] if batch.valid is None else batch.valid
        if not valid:  # the mean over no labels is NaN
            kept = "decoder_input_ids" not in batch and takes_argument(model, "decoder_input_ids")  # from labels
            output = model(**{name: value for name, value in batch.items() if kept or name != "labels"})
            scores = output[1 if kept else 0]  # after the loss, if there is one
            loss = 0.0 * scores.float().sum()
        else:
            output = model(**batch)
            loss = (output[0] if isinstance(output, tuple) else output.loss) * valid / count
            scores = output[1] if len(output) > 1 else loss
        self._keep(output)
        # All ranks sum their losses, so the dtype must not depend on whether a rank has labels.
        return loss.to(torch.float64 if getattr(scores, "dtype", None) == torch.float64 else torch.float32)

    def scoring(self, temperature: float) -> AbstractContextManager[Any]:
        """Refuse token scores: they are defined for causal language models."""
        raise ConfigError(f"scores are of causal language models' tokens, and {self._name} has another loss")


class ModelsOwnLoss(Part):
    """A part that normalizes the steps of models that compute their own mean loss."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Set the runtime's loss; the model itself is not changed."""
        planned = runtime.plan.feature(OwnLossPlan)
        if planned is not None:
            runtime.loss = OwnLoss(planned, class_name(runtime.model))
