"""The objective of a step's microbatches: the loss of the model, or one of its token scores."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from .batches import Microbatch


class StepLoss(Protocol):
    """A loss that can be normalized for a whole step.

    Attributes:
        shift: by how many positions labels are shifted against the tokens they are compared with.
        expected_gradient: the gradient with which backward passes start (a loss scale), for losses that compute
            16-bit gradients in the forward pass.
        needs_labels: whether batches without ``labels`` are refused.
        ignores: whether labels of -100 are ignored.
        divides: whether the model's own code divides the loss by ``num_items_in_batch``.
    """

    shift: int
    expected_gradient: float
    needs_labels: bool
    ignores: bool
    divides: bool

    def look(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Count the positions of a microbatch that contribute to the loss, and its labels outside of the vocabulary;
        the counts are on the batch's device and are not waited for.
        """

    def of(self, model: nn.Module, batch: Microbatch, count: Tensor, label_smoothing: float) -> Tensor:
        """Compute the loss of one microbatch, scaled for a step with ``count`` valid labels."""

    def check_smoothing(self, label_smoothing: float) -> None:
        """Raise :class:`ConfigError`, on all ranks alike, if its labels cannot be smoothed."""

    def scoring(self, temperature: float) -> AbstractContextManager[Any]:
        """Let forward passes inside the `with` block compute token scores; the loss they return does not count."""

    def keeping_outputs(self) -> AbstractContextManager[list[Any]]:
        """Append the model's output of every microbatch inside the `with` block to the list, with full logits, ``[b, s,
        V]``.
        """


class KeepsOutputs:
    """A base of losses that records the model's outputs on request."""

    _kept: list[Any] | None = None

    @contextmanager
    def keeping_outputs(self) -> Iterator[list[Any]]:
        """Record the model's outputs inside the `with` block: see :meth:`StepLoss.keeping_outputs`."""
        self._kept = []
        try:
            yield self._kept
        finally:
            self._kept = None

    def _keep(self, output: Any) -> None:
        if self._kept is not None:
            self._kept.append(output)


@dataclass(frozen=True)
class Objective:
    """The loss of a step's microbatches, computed on the rank that has the head.

    Attributes:
        loss: ``loss(model, microbatch, index)``, scaled so that the step's loss is the sum over microbatches.
        recomputes: whether its backward pass recomputes, so that weight gradients cannot be deferred.
    """

    loss: Callable[[Any, Microbatch, int], Tensor]
    recomputes: bool = False
