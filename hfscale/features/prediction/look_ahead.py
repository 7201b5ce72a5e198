"""Compute the tokens and targets that lie further ahead of every position."""

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
    """Return the ids and the targets of ``depths`` further tokens for every position, ``[b, depths, s]`` each.

    ::

        ids        a  b  c  d          depth 1, at a: the embedding of b, and what b predicts: c
        targets    b  c  d  -          depth 2, at a: that of c, and d

    There is no target (-100) past the end of the row or of the document, which is where ``position_ids`` begin anew. A
    label is ``shift`` behind the token that predicts it; ``shift_labels`` are targets already.
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
