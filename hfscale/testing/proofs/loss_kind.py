"""Prove that a model's loss is the shifted cross entropy of causal language models, by the inputs of its loss function.

Names do not tell: classes whose loss goes by another name use that very function, and some of those with its name shift
labels themselves, or add to the loss. So the model is run on two tokens with labels, mostly without memory, and with a
function of our own in the place of its loss.
"""

from typing import Any

import torch
from torch import Tensor

from ..._compat.transformers.classes import has_causal_loss, loss_replaced
from ...plan.drafting.boundary_modules import PROBED
from .clones import tiny_model
from .probe import Probe, names_no_size, skipped_experts


def prove_loss(model: Any) -> tuple[str | None, bool]:
    """Return the answer of :func:`passes_on_labels`."""
    why = passes_on_labels(model)
    return why, names_no_size(why or "")


def passes_on_labels(model: Any) -> str | None:
    """Return why the model's loss is not transformers' shifted loss; ``None`` where it calls that once, on the logits
    of all tokens and the given labels, and returns its result.
    """
    if not has_causal_loss(model):
        return f"its loss_type is {getattr(model, 'loss_type', None)!r}"
    probe = _LossProbe(model)
    if probe.failure and (clone := tiny_model(model)) is not None:
        probe = _LossProbe(clone)
    return f"it cannot be traced ({probe.failure})" if probe.failure else probe.difference


class _LossProbe(Probe):
    """Run a model with labels.

    Attributes:
        difference: how the model's loss differs, in words; ``None`` if it does not.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.difference: str | None = None
        self._calls = 0
        device = next(model.parameters()).device
        self._labels = torch.full(PROBED, 4, dtype=torch.long, device=device)
        self._answer = torch.zeros((), device=device)
        self._handles.append(model.register_forward_hook(self._compare))
        with loss_replaced(model, self._loss), skipped_experts(model.modules()):
            self._run(model, labels=self._labels)

    def _loss(self, logits: Any = None, labels: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        self._calls += 1
        if not isinstance(logits, Tensor) or tuple(logits.shape[:2]) != PROBED:
            self.difference = "its loss is not of the logits of all tokens"
        elif not isinstance(labels, Tensor) or labels.shape != self._labels.shape or not self._is_given(labels):
            self.difference = "it changes labels before its loss"
        elif kwargs.get("shift_labels") is not None:
            self.difference = "it shifts labels itself"
        return self._answer

    def _is_given(self, labels: Tensor) -> bool:
        return labels is self._labels or (not labels.is_meta and bool((labels == self._labels).all()))

    def _compare(self, _: Any, args: Any, output: Any) -> None:
        loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if self._calls != 1:
            self.difference = f"it calls its loss function {self._calls} times"
        elif loss is not self._answer:
            self.difference = self.difference or "it computes on its loss"
