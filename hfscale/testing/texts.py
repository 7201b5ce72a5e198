"""Make random texts for tiny models."""

from typing import Any

import torch
from torch import Tensor

from ..models.fields import text_config

_ANY = 60


def vocabulary_of(config: Any) -> int:
    """Return a model's vocabulary size, or that of tiny models if only a nested config has one."""
    return int(getattr(text_config(config), "vocab_size", _ANY))


def ragged_batch(
    generator: torch.Generator, vocabulary: int, rows: int, length: int, masked: bool
) -> dict[str, Tensor]:
    """Return random tokens; about a third of the labels are ignored, and the second row is padded at its end."""
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.35, -100)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, -3:] = 0
        labels[1, -3:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.fill_(-100) if masked else labels}
