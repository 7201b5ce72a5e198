"""Adapt batches with fewer rows than a schedule needs, or with examples that must not count."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...parallel.pipeline.microbatches import rows_of
from ...train.runtime import Executor
from .dealt import Repeated

__all__ = [
    "Collator",
    "Marked",
    "cut_by_schedule",
    "filled_up",
    "first_of_chunks",
    "first_rows",
    "pieces",
    "rows_of",
    "warn_of_repeated",
    "with_rows",
    "without_labels",
]

_LABELS = ("labels", "shift_labels")
_IGNORED = -100


def filled_up(batches: Sequence[Mapping[str, Any]], count: int, rows: int) -> list[Mapping[str, Any]]:
    """Pad to ``count`` batches of ``rows`` rows; at the end of an epoch there may be fewer of both.

    A schedule cannot run every number of microbatches, nor cut every number of rows into them. Added rows repeat the
    last one without labels, so that they change neither loss nor gradients. For losses without an ignored label, see
    :func:`pieces`.
    """
    full = [with_rows(batch, rows) for batch in batches]
    return full + [without_labels(full[-1])] * (count - len(full))


@contextmanager
def cut_by_schedule(
    executor: Executor, batches: Sequence[Mapping[str, Any]], arguments: Any, ignores: bool
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield a pipelined step's batches, padded to the number and size that ``TrainingArguments`` say.

    Args:
        ignores: whether the loss has a label that is ignored.
    """
    count, rows = arguments.gradient_accumulation_steps, arguments.per_device_train_batch_size
    if ignores:
        yield filled_up(batches, count, rows)
        return
    with executor.uncut():
        yield [*chain(*pieces(executor, batches, count, rows))]


def pieces(
    executor: Executor, batches: Sequence[Mapping[str, Any]], count: int, rows: int
) -> list[list[Mapping[str, Any]]]:
    """Return the microbatches of each of ``count`` batches of ``rows`` rows; the last batches may have fewer, or none.

    For losses without an ignored label, to which no row can be added: 3 rows in 4 microbatches are 1 + 1 + 1 + 0. Run
    them inside of ``executor.uncut()``.
    """
    row = torch.zeros(rows, 2, dtype=torch.int64)
    each = len(executor.share_out([{"input_ids": row, "labels": row}] * count)) // count
    given = [*batches, *[first_rows(batches[-1], rows_of(batches[-1]), 0)] * (count - len(batches))]
    return [_cut(batch, rows_of(batch), each) for batch in given]


def _cut(batch: Mapping[str, Any], rows: int, parts: int) -> list[Mapping[str, Any]]:
    ends = [rows * (index + 1) // parts for index in range(parts)]
    starts = [0, *ends[:-1]]
    if rows == 0:
        return [batch] * parts

    def part(value: Any, start: int, end: int) -> Any:
        return value[start:end] if isinstance(value, Tensor) and value.ndim and len(value) == rows else value

    return [
        {name: part(value, start, end) for name, value in batch.items()}
        for start, end in zip(starts, ends, strict=True)
    ]


def first_examples(batch: Mapping[str, Any], known: tuple[int, int], drop: bool = True) -> Mapping[str, Any]:
    """Return ``batch`` with only its first examples counting.

    Args:
        known: how many it has, and how many of them count, from the first one on.
        drop: leave the others' rows out; else they lose their labels, as packed examples in one row always do.
    """
    (given, own), rows = known, rows_of(batch)
    if own >= given or (rows != given and rows != 1):
        return batch
    if rows == given:
        return first_rows(batch, rows, own) if drop else without_labels(batch, since=own)
    lengths = batch.lengths if isinstance(batch, Marked) else []
    return without_tokens(batch, sum(lengths[:own])) if len(lengths) == given else batch


def warn_of_repeated(trainer: Any, known: tuple[int, int] | None) -> None:
    """Warn once that examples count twice in a loss from which hfscale cannot leave them out.

    Args:
        known: how many examples the last batch has, and how many of these are not repeated.
    """
    if known is None or known[1] >= known[0] or vars(trainer).setdefault("_told_of_repeated", False):
        return
    vars(trainer)["_told_of_repeated"] = True
    warnings.warn(
        f"data ranks are given as many examples each, so {known[0] - known[1]} of an epoch's last batch are dealt "
        f"twice, and the loss of {type(trainer).__name__} counts them twice, as over data ranks of stock Trainer: give "
        "it data sets of whole steps, or dataloader_drop_last=True",
        stacklevel=2,
    )


class Marked(dict[str, Any]):
    """A batch with the numbers of the examples in it.

    Attributes:
        lengths: how many tokens each example has, if all are packed into one row; positions cannot tell, since an
            example may consist of several texts.
        known: how many examples there are, and how many of them count.
    """

    lengths: tuple[int, ...] = ()
    known: tuple[int, int] = (0, 0)


class Collator:
    """A wrapper of ``collate`` whose batches are :class:`Marked` if examples are repeated or packed."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: Any) -> Any:
        """Collate examples, marking repeated and packed ones."""
        repeats = sum(isinstance(each, Repeated) for each in examples)
        plain = [each.example if isinstance(each, Repeated) else each for each in examples] if repeats else examples
        batch = self._collate(plain)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        in_one_row = isinstance(ids, Tensor) and ids.ndim == 2 and 1 == len(ids) < len(plain)
        if not isinstance(batch, Mapping) or not (repeats or in_one_row):
            return batch
        marked = Marked(batch)
        marked.known = len(plain), len(plain) - repeats
        marked.lengths = tuple(len(example["input_ids"]) for example in plain) if in_one_row else ()
        return marked


def first_rows(batch: Mapping[str, Any], has: int, rows: int) -> Mapping[str, Any]:
    """Return ``batch`` with the first ``rows`` of its ``has`` rows; there may be none left."""
    if rows == has:
        return batch
    return {
        name: value[:rows] if isinstance(value, Tensor) and value.ndim and len(value) == has else value
        for name, value in batch.items()
    }


def first_of_chunks(batch: Mapping[str, Any], has: int, rows: int) -> Mapping[str, Any]:
    """Return ``batch`` with the first ``rows`` of its ``has`` rows, in both halves if chosen rows precede rejected
    ones.
    """
    return {
        name: torch.cat([chunk[:rows] for chunk in value.split(has)])
        if isinstance(value, Tensor) and value.ndim and len(value) in (has, 2 * has)
        else value
        for name, value in batch.items()
    }


def with_rows(batch: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
    """Return ``batch`` with at least ``rows`` rows, repeating the last one without labels."""
    has = rows_of(batch)
    if not 0 < has < rows:
        return batch
    return {name: _repeated(name, value, has, rows) for name, value in batch.items()}


def without_labels(batch: Mapping[str, Any], since: int = 0) -> Mapping[str, Any]:
    """Return ``batch`` with all labels of rows from ``since`` on ignored."""
    masked = dict(batch)
    for name in _LABELS:
        if isinstance(batch.get(name), Tensor):
            masked[name] = batch[name].clone()
            masked[name][since:] = _IGNORED
    return masked


def without_tokens(batch: Mapping[str, Any], since: int) -> Mapping[str, Any]:
    """Return ``batch`` with all labels of tokens from ``since`` on ignored."""
    masked = dict(batch)
    for name in _LABELS:
        if isinstance(batch.get(name), Tensor):
            masked[name] = batch[name].clone()
            masked[name][:, since:] = _IGNORED
    return masked


def _repeated(name: str, value: Any, has: int, rows: int) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != has:
        return value
    more = value[-1:].expand(rows - has, *value.shape[1:])
    return torch.cat((value, torch.full_like(more, _IGNORED) if name in _LABELS else more))
