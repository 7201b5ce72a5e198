"""Batches without rows: the last batch of an epoch, say, if there are fewer samples than data ranks.

A rank without rows must still take part in every collective of the step, or the others wait for it forever. So it
computes rows of padding with ignored labels: its terms of the loss and of every gradient are exactly zero.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..runtime import Runtime

_IGNORED = -100
_LABELS = ("labels", "shift_labels")


def without_gaps(runtime: Runtime, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``batch``, or a batch of padding if it has no rows."""
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor)), None)
    if tokens is None or tokens.ndim < 2 or tokens.shape[0] > 0:
        return batch
    rows = runtime.executor.fewest_rows()
    filled = {name: _filled(name, value, rows) for name, value in batch.items()}
    # Expert balance ignores masked tokens, so mask all of them; other models should attend to some token.
    length = filled["input_ids" if "input_ids" in filled else "inputs_embeds"].shape[1]
    mask = torch.full((rows, length), int(not any(part.masks_padding for part in runtime.parts)), device=tokens.device)
    given = batch.get("attention_mask")
    if given is None or given.ndim == 2:
        filled["attention_mask"] = mask if given is None else mask.to(given.dtype)
    return filled


def _filled(name: str, value: Any, rows: int) -> Any:
    """Return ``rows`` rows of padding, of at least two tokens, in place of a tensor without rows."""
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] > 0:
        return value
    _, length, *others = value.shape
    return value.new_full((rows, max(2, length), *others), _IGNORED if name in _LABELS else 0)
