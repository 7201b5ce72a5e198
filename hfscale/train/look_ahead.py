"""Shift ids and targets for multi-token prediction: pure arithmetic."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._compat.transformers.computing import begins_anew, text_positions
from ..plan.prediction_plan import IDS, TARGETS

_IGNORED = -100


def look_ahead(batch: Mapping[str, Any], depths: int, shift: int) -> dict[str, Tensor]:
    """Return the ids and the targets of ``depths`` further tokens for every position, ``[b, depths, s]`` each.

    ::

        ids        a  b  c  d          depth 1, at a: the embedding of b, and what b predicts: c
        targets    b  c  d  -          depth 2, at a: that of c, and d

    Positions have no target (-100) where the target, or a token on the way to it, is past the end of the row or of the
    document, which ends where ``position_ids`` begin anew.

    Args:
        shift: how far behind its token a label is that it predicts; ``shift_labels`` are targets already.
    """
    ids, targets = batch["input_ids"], batch.get("shift_labels")
    if targets is None:
        targets = F.pad(batch["labels"], (0, shift), value=_IGNORED)[..., shift:]
    tokens, documents = ids.shape[1], _documents(batch)
    all_ids, all_targets = [], []
    for depth in range(1, depths + 1):
        end = (0, min(depth, tokens))
        later = F.pad(targets[:, depth:], end, value=_IGNORED)
        if documents is not None:
            of_target = F.pad(documents[:, 1:], (0, 1), mode="replicate") if tokens > 1 else documents
            later = later.where(documents == F.pad(of_target[:, depth:], end, value=-1), _IGNORED)
        all_ids.append(F.pad(ids[:, depth:], end))
        all_targets.append(later)
    return {IDS: torch.stack(all_ids, 1), TARGETS: torch.stack(all_targets, 1)}


def _documents(batch: Mapping[str, Any]) -> Tensor | None:
    """Return which document of its row each token is in, ``[1 or b, s]``; ``None`` without positions."""
    given = batch.get("position_ids")
    positions = None if given is None else text_positions(given)
    if positions is None:
        return None
    return F.pad(begins_anew(positions, batch.get("attention_mask")).cumsum(-1), (1, 0)).to(batch["input_ids"].device)
