"""Packed rows for the judge of a draw: the stock model computes each document by itself."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from .fuzz_batches import spans, valid_labels


def by_document(forward: Callable[..., Any], first: bool) -> Callable[..., Any]:
    """Return a forward pass that runs ``forward`` on each document of packed rows. ``first``: whether its loss counts
    the labels of first tokens.
    """

    @functools.wraps(forward)
    def run(**batch: Any) -> Any:
        if batch.get("position_ids") is None or "past_key_values" in batch:
            return forward(**batch)
        total = torch.zeros((), dtype=torch.float64)
        logits = list[Tensor]()
        count = 0
        for row, start, end in spans(batch):
            part = {name: value[row : row + 1, start:end] for name, value in batch.items()}
            # Beside padding, positions are not what a model would count itself.
            if "attention_mask" not in part:
                del part["position_ids"]
            labels = valid_labels(part, first) if "labels" in part else 0
            found = forward(
                **part if labels else {name: part[name] for name in part if name != "labels"}
            )
            if labels:
                total = total + found.loss * labels
                count = count + labels
            logits.append(found.logits[0])
        rows = torch.cat(logits).unflatten(0, tuple(batch["input_ids"].shape))
        return CausalLMOutput(loss=(total / count).to(rows.dtype) if count else None, logits=rows)

    return run
