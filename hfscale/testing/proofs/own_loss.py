"""Prove over what a model's own loss is a mean.

A step is divided into microbatches and data ranks, and its loss must not depend on how. That holds where the loss of
two batches together is the mean of their losses, weighted by how much is in each: by rows (texts that are classified),
or by labels that are not ignored (tokens). Which it is, if any, a tiny clone shows: it is given two batches by
themselves and together. A loss that is no such mean (a contrast between the rows of a batch) is refused by
``train_step``.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..._host.transformers.classes import takes_argument
from ..._host.transformers.experts import use_eager_experts
from ...families.fields import text_config
from ...families.precision import keep_float64
from ...plan.own_loss import OwnLossPlan
from .clones import tiny_model_of

_ROWS, _TOKENS = (3, 2), 6
_IGNORED, _LARGEST_ID = -100, 60
_TOLERANCE = 1e-9


def prove_own_loss(model: Any) -> tuple[dict[str, Any] | None, bool]:
    """Return the fields of a :class:`hfscale.plan.own_loss.OwnLossPlan`, or ``None`` where the loss is no such mean."""
    found = _find(type(model), model.config)
    return (asdict(found) if found is not None else None), True


def _find(kind: type, config: Any) -> OwnLossPlan | None:
    model = tiny_model_of(kind, config, torch.float64)
    if model is None:
        return None
    model.eval()
    use_eager_experts(model)  # the host's grouped matrix products take no float64
    text = text_config(model.config)
    for part in (model.config, text):
        # Decoders find the last token of each row by padding; without it they take one row at a time.
        part.pad_token_id = 0 if getattr(part, "pad_token_id", None) is None else part.pad_token_id
    end = getattr(text, "eos_token_id", None)  # which encoder-decoders classify texts by
    end = end if isinstance(end, int) and getattr(model.config, "is_encoder_decoder", False) else None
    vocabulary = getattr(text, "vocab_size", _LARGEST_ID)  # some look up hashes of characters
    for first, second in _pairs(int(getattr(config, "num_labels", 2) or 2), int(vocabulary), end):
        with suppress(Exception), torch.no_grad(), keep_float64():  # whatever stock code says of labels of a wrong kind
            together = {name: torch.cat([first[name], second[name]]) for name in first}
            losses = [float(model(**batch).loss) for batch in (first, second, together)]
            over = next((over for over, count in _COUNTS.items() if _is_mean(count, losses, first, second)), None)
            if over is not None:
                return OwnLossPlan(over, _divides(model, first, losses[0]))
            if not _some_rows_ignored(first):
                return None
    return None


def _pairs(classes: int, vocabulary: int, end: int | None) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Two batches of different rows, with a label per row, or one per token; some are ignored, where there are classes.

    Args:
        end: the token that every row ends with, and has nowhere else.
    """
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, min(_LARGEST_ID, vocabulary), (rows, _TOKENS), generator=generator) for rows in _ROWS]
    if end is not None:
        ids = [each.masked_fill(each == end, 3 if end != 3 else 4) for each in ids]
        for each in ids:
            each[:, -1] = end
    kinds = torch.randint(0, max(classes, 1), (sum(_ROWS), _TOKENS), generator=generator)
    tokens = kinds.masked_fill(torch.rand(kinds.shape, generator=generator) < 0.4, _IGNORED)
    rows = kinds[:, 0] if classes > 1 else kinds[:, 0] + torch.rand(sum(_ROWS), generator=generator).double()
    some = rows.index_fill(0, torch.tensor([1]), _IGNORED)
    for labels in (some, rows, tokens) if classes > 1 else (rows, tokens):
        first, second = labels.split(list(_ROWS))
        masks = [torch.ones_like(each) for each in ids]
        yield tuple(  # type: ignore[misc]
            {"input_ids": each, "attention_mask": mask, "labels": own}
            for each, mask, own in zip(ids, masks, (first, second), strict=True)
        )


def _divides(model: Any, batch: dict[str, Tensor], mean: float) -> bool:
    """Whether a step's number of labels is what the loss is divided by."""
    if not takes_argument(model, "num_items_in_batch"):
        return False
    return abs(float(model(**batch, num_items_in_batch=1000).loss) - mean) > _TOLERANCE


def _some_rows_ignored(batch: dict[str, Tensor]) -> bool:
    labels = batch["labels"]
    return labels.ndim == 1 and bool((labels == _IGNORED).any())


def _is_mean(count: Any, losses: list[float], first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    one, other = (int(count(batch["labels"])) for batch in (first, second))
    weighted = (losses[0] * one + losses[1] * other) / (one + other)
    return abs(weighted - losses[2]) <= _TOLERANCE * abs(losses[2])


_COUNTS = {"rows": len, "labels": lambda labels: (labels != _IGNORED).sum()}
