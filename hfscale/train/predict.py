"""An evaluation step that returns the logits, in any layout."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .step import eval_step


def predict_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    label_smoothing: float = 0.0,
    num_items_in_batch: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of :func:`hfscale.eval_step` and the logits of this rank's batch, ``[b, s, V]``.

    Every rank gets full logits: gathered over the vocabulary and the sequence, and sent from the last stage to all
    stages. They are as large as in one process.

    Raises:
        ConfigError: as :func:`hfscale.eval_step`.
    """
    loss, outputs = eval_step(
        model, batch, label_smoothing=label_smoothing, num_items_in_batch=num_items_in_batch, return_outputs=True
    )
    return loss, outputs.logits
