"""Compute the inputs and targets of multi-token prediction: at depth ``k``, the input of a position is the token ``k``
positions later, and its target is the token after this one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._compat.transformers.packed_rows import documents_of, text_positions


def look_ahead(
    batch: Mapping[str, Any],
    depths: int,
    shift: int,
) -> tuple[Tensor, Tensor]:
    """Return input ids and targets of ``depths`` prediction layers for every position, ``[b, depths, s]`` each.

    ::

        ids        a  b  c  d          depth 1 at position of a: input b, target c
        targets    b  c  d  -          depth 2 at position of a: input c, target d

    Targets past the end of the row, or of the document, are -100 (ignored). A document ends where ``position_ids``
    begin anew. ``labels`` are shifted by ``shift`` tokens to get targets; ``shift_labels`` are targets already.
    """
    ids = batch["input_ids"]
    targets = batch.get("shift_labels")
    if targets is None:
        targets = pad(batch["labels"], (0, shift), value=-100)[..., shift:]
    given = batch.get("position_ids")
    positions = None if given is None else text_positions(given)
    documents = torch.zeros_like(ids[:1])
    if positions is not None:
        documents = documents_of(positions, batch.get("attention_mask")).to(ids.device)
    of_targets = torch.cat((documents[:, 1:], documents[:, -1:]), 1)
    ids_ahead = []
    targets_ahead = []
    for depth in range(1, depths + 1):
        end = (0, min(depth, ids.shape[1]))
        same = documents == pad(of_targets[:, depth:], end, value=-1)
        ids_ahead.append(pad(ids[:, depth:], end))
        targets_ahead.append(pad(targets[:, depth:], end, value=-100).where(same, -100))
    return torch.stack(ids_ahead, 1), torch.stack(targets_ahead, 1)
