"""What a step makes of its microbatches: the loss of the model, or one of its scores."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from .batches import Microbatch


class StepLoss(Protocol):
    """A loss that can be normalized for a whole step.

    Attributes:
        shift: how far behind a token its label is.
        expected_gradient: with which its backward passes will begin, for what takes 16-bit gradients before.
        needs_labels: whether batches without ``labels`` are refused.
        ignores: whether labels of -100 count nothing.
        divides: whether the model's own code divides it by ``num_items_in_batch``.
    """

    shift: int
    expected_gradient: float
    needs_labels: bool
    ignores: bool
    divides: bool

    def look(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """How many positions of one microbatch contribute to it, and how many labels are outside of the vocabulary;
        where the batch is, and without waiting for it.
        """

    def of(self, model: nn.Module, batch: Microbatch, count: Tensor, label_smoothing: float) -> Tensor:
        """The loss of one microbatch, as a share of a step with ``count`` valid labels."""

    def check_smoothing(self, label_smoothing: float) -> None:
        """Raise :class:`ConfigError` where its labels cannot be smoothed, on all ranks alike."""

    def scoring(self, temperature: float) -> AbstractContextManager[Any]:
        """Within: a pass scores its tokens, and its loss is not what counts."""

    def keeping_outputs(self) -> AbstractContextManager[list[Any]]:
        """Within: what the model returns of every microbatch is added to the list, logits whole, ``[b, s, V]``."""


class KeepsOutputs:
    """What a loss does with the outputs of the model that it is taken from: nothing, or they are asked for."""

    _kept: list[Any] | None = None

    @contextmanager
    def keeping_outputs(self) -> Iterator[list[Any]]:
        """See :meth:`StepLoss.keeping_outputs`."""
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
    """What a step makes of its microbatches, where the head is.

    Attributes:
        loss: of one microbatch, by its number, as a share of the step's; is given what to call.
        recomputes: whether its backward pass computes again, so that weights' gradients are not to be taken apart.
    """

    loss: Callable[[Any, Microbatch, int], Tensor]
    recomputes: bool = False
