"""The batches of a draw."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .draw import Draw

Batch = dict[str, Tensor]
Call = list[list[Batch]]
"""``[distinct batch][microbatch]`` of one call of the loop."""


def batches(draw: Draw, world: int, vocabulary: int) -> list[list[Call]]:
    """``[step][call]``, with a label at least in every call, and in every microbatch of a plain loop.

    There, stock code's loss of one without any is no number.
    """
    generator = torch.Generator().manual_seed(draw.seed)
    steps = []
    for step in range(draw.steps):
        calls = [
            [[_microbatch(draw, generator, vocabulary, step, rank, world, i) for i in range(max(1, draw.microbatches))]
             for rank in range(world)]
            for _ in range(draw.calls)
        ]  # fmt: skip
        steps.append(calls)
    for calls in steps:
        for call in calls:
            for microbatch in (m for rank in call for m in rank) if draw.loop == "plain" else ():
                if not valid_labels(microbatch):
                    _label_all(draw, microbatch)
            if not any(valid_labels(microbatch) for rank in call for microbatch in rank):
                _label_all(draw, call[0][0])
    return steps


def _label_all(draw: Draw, batch: Batch) -> None:
    """Give every token a label that its document predicts."""
    batch["labels"] = batch["input_ids"].clone()
    if draw.packed and draw.positions:
        batch["labels"][begins(batch)] = -100


def valid_labels(microbatch: Batch, first: bool = False) -> int:
    """Labels that a causal language model learns from, also those of rows' ``first`` tokens."""
    return int((microbatch["labels"][:, not first :] != -100).sum())


def as_given(draw: Draw, microbatches: list[Batch]) -> Any:
    """What a rank hands to ``train_step``: a list, or one dict."""
    return microbatches if draw.microbatches else microbatches[0]


def _microbatch(
    draw: Draw,
    generator: torch.Generator,
    vocabulary: int,
    step: int,
    rank: int,
    world: int,
    index: int,
) -> Batch:
    length = max(2, draw.lengths[(rank + index) % len(draw.lengths)]) if index + rank == 0 else 0
    length = length or draw.lengths[(rank + index) % len(draw.lengths)]
    rows = 1 + (draw.rows - 1 + rank + index) % draw.rows if draw.ragged else draw.rows
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = ids.clone()
    if draw.masked != "none":
        labels = labels.masked_fill(torch.rand(ids.shape, generator=generator) < 0.35, -100)
    last = rank == world - 1 and world > 1
    nothing = {
        "rows": slice(-1, None) if rows > 1 else slice(0),
        "microbatch": slice(None) if step == 0 and index == draw.microbatches - 1 else slice(0),
        "rank": slice(None) if last else slice(0),
    }
    labels[nothing.get(draw.masked, slice(0))] = -100
    batch = {"input_ids": ids, "labels": labels}
    if draw.padding != "none":
        batch["attention_mask"] = mask = _padding(draw.padding, rows, length)
        labels[mask == 0] = -100
    if draw.positions:
        mask = batch.get("attention_mask", torch.ones_like(ids))
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        if draw.packed:
            batch["position_ids"] %= length // 2 + 1
            labels[begins(batch)] = -100
    if draw.empty_rank and last:
        batch = {name: value[:0] for name, value in batch.items()}
    return batch


def _padding(side: str, rows: int, length: int) -> torch.Tensor:
    """A mask with more padding in every row, and none in the first."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row in range(1, rows):
        out = min(row * 2 - 1, length - 1)
        mask[row, slice(length - out, length) if side == "right" else slice(0, out)] = 0
    return mask


def spans(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Yield row, start and end of every document."""
    positions = batch["position_ids"]
    mask = batch.get("attention_mask")
    for row, numbers in enumerate(positions.tolist()):
        seen = [1] * len(numbers) if mask is None else mask[row].tolist()
        pairs = zip(numbers, numbers[1:], seen, seen[1:], strict=False)
        begins = [
            i for i, (one, two, *both) in enumerate(pairs, start=1) if two <= one and all(both)
        ]
        yield from (
            (row, start, end)
            for start, end in zip([0, *begins], [*begins, len(numbers)], strict=True)
        )


def begins(batch: Batch) -> Tensor:
    """Return flags ``[b, s]`` of tokens that no token of their document predicts: the first, also after padding."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    found = torch.nn.functional.pad(mask[:, :-1] == 0, (1, 0), value=True)
    for row, start, _ in spans(batch):
        found[row, start] = True
    return found
