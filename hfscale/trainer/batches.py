"""Batches with fewer rows than a schedule can run, or with examples that do not count."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..parallel.pipeline.microbatches import rows_of
from ..runtime import Executor
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
    """``count`` batches of ``rows`` rows: at the end of an epoch there may be fewer of both.

    A schedule cannot run any number of microbatches, nor cut any number of rows into them. Rows that are added repeat
    the last one and have no labels: they count nothing, and so change neither loss nor gradients. Of a loss that has no
    label for that, see :func:`pieces`.
    """
    full = [with_rows(batch, rows) for batch in batches]
    return full + [without_labels(full[-1])] * (count - len(full))


@contextmanager
def cut_by_schedule(
    executor: Executor, batches: Sequence[Mapping[str, Any]], arguments: Any, ignores: bool
) -> Iterator[list[Mapping[str, Any]]]:
    """Within: the batches of a step through stages, as many and as large as ``TrainingArguments`` say.

    Args:
        ignores: whether the loss has labels that count nothing.
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
    """The microbatches of each of ``count`` batches of ``rows`` rows, of which the last ones may have fewer, or none.

    For losses that have no label that counts nothing, so that no row can be added: 3 rows in 4 microbatches are
    1 + 1 + 1 + 0. Run them within ``executor.uncut()``.
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
    """``batch``, not all of whose examples count.

    Args:
        known: how many it has, and how many count, from the first one on.
        drop: leave rows out that do not; else they lose their labels, as examples do that are packed into one row.
    """
    (given, own), rows = known, rows_of(batch)
    if own >= given or (rows != given and rows != 1):
        return batch
    if rows == given:
        return first_rows(batch, rows, own) if drop else without_labels(batch, since=own)
    lengths = batch.lengths if isinstance(batch, Marked) else []
    return without_tokens(batch, sum(lengths[:own])) if len(lengths) == given else batch


def warn_of_repeated(trainer: Any, known: tuple[int, int] | None) -> None:
    """Say once that examples count twice, in losses that hfscale does not know how to leave them out of.

    Args:
        known: how many the last batch has, and how many of them repeat none.
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
    """A batch that knows of which examples it was made.

    Attributes:
        lengths: how many tokens each example has, where all are one row; positions do not tell, since an example may be
            of several texts.
        known: how many examples there are, and how many of them count.
    """

    lengths: tuple[int, ...] = ()
    known: tuple[int, int] = (0, 0)


class Collator:
    """``collate``, whose batches are :class:`Marked` where something is to be known of them."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: Any) -> Any:
        """What it makes of examples."""
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
    """``batch`` without the others of its ``has`` rows; there may be none left."""
    if rows == has:
        return batch
    return {
        name: value[:rows] if isinstance(value, Tensor) and value.ndim and len(value) == has else value
        for name, value in batch.items()
    }


def first_of_chunks(batch: Mapping[str, Any], has: int, rows: int) -> Mapping[str, Any]:
    """``batch`` without the others of its ``has`` rows, in both chunks where chosen rows precede rejected ones."""
    return {
        name: torch.cat([chunk[:rows] for chunk in value.split(has)])
        if isinstance(value, Tensor) and value.ndim and len(value) in (has, 2 * has)
        else value
        for name, value in batch.items()
    }


def with_rows(batch: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
    """``batch`` with at least so many rows."""
    has = rows_of(batch)
    if not 0 < has < rows:
        return batch
    return {name: _repeated(name, value, has, rows) for name, value in batch.items()}


def without_labels(batch: Mapping[str, Any], since: int = 0) -> Mapping[str, Any]:
    """``batch`` whose rows from ``since`` on count nothing."""
    masked = dict(batch)
    for name in _LABELS:
        if isinstance(batch.get(name), Tensor):
            masked[name] = batch[name].clone()
            masked[name][since:] = _IGNORED
    return masked


def without_tokens(batch: Mapping[str, Any], since: int) -> Mapping[str, Any]:
    """``batch`` whose tokens from ``since`` on count nothing."""
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
