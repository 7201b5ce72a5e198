"""Divide examples over data ranks, and adapt batches that have too few rows for a schedule, or rows that are only
padding.

All data ranks get the same number of examples of an iterable dataset, in the order of one process. If the dataset ends
within a step, the last batches are padded with examples from the beginning, which are marked so that they do not
count::

    10 examples, two ranks, 3 rows each         rank 0: 0 1 2 | 6 7 8
                                                rank 1: 3 4 5 | 9 (0) (1)
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ...parallel.pipeline.microbatches import rows_of
from ...train.balanced_batches import balanced_batches
from ...train.runtime import Executor, Runtime
from ..accelerator.loaders import KEPT, InOneOrder

Batch = Mapping[str, Any]

_LABELS = ("labels", "shift_labels")
IGNORED = -100


@dataclass
class Repeated:
    """Mark an example that is already in another rank's batch or in an earlier step."""

    example: Any


class DealtStream(InOneOrder):
    """Divide an iterable dataset like Accelerate, with :class:`Repeated` examples as padding of the last step."""

    def of_last_step(self, example: Any, is_new: bool, left: int) -> Any:
        """Return the example, marked if it is padding."""
        return example if is_new else Repeated(example)


def balanced(loader: Any, runtime: Runtime) -> Any:
    """Return a copy of ``loader``, the loader of the sampling strategy ``batch_rebalance``, that divides the rows of a
    step over data ranks so that the costs of their batches are about equal.
    """
    given = loader.batch_sampler
    rows = given.effective_batch_size // given.dp_size * runtime.mesh.batch_world
    sampler = balanced_batches(
        runtime.model, given.lengths, rows, given.grad_accum, drop_last=given.drop_last
    )
    kept = {name: getattr(loader, name) for name in KEPT if name != "drop_last"}
    return DataLoader(loader.dataset, batch_sampler=sampler, **kept)


class Marked(dict[str, Any]):
    """Hold a batch, the number of its examples, and the number of those that count, since the others only pad the
    batch.
    """

    # the number of tokens of each example, if all are packed into one row; positions do not show it, because an example
    # may consist of several texts
    lengths: tuple[int, ...] = ()
    known: tuple[int, int] = (0, 0)  # the number of examples, and the number of examples that count


class Collator:
    """Wrap ``collate``; its batches become :class:`Marked` if examples are repeated or packed."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: Any) -> Any:
        """Collate examples, and mark repeated and packed examples."""
        repeats = sum(isinstance(each, Repeated) for each in examples)
        plain = (
            [each.example if isinstance(each, Repeated) else each for each in examples]
            if repeats
            else examples
        )
        batch = self._collate(plain)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        in_one_row = isinstance(ids, Tensor) and ids.ndim == 2 and 1 == len(ids) < len(plain)
        if not isinstance(batch, Mapping) or not (repeats or in_one_row):
            return batch
        marked = Marked(batch)
        marked.known = len(plain), len(plain) - repeats
        marked.lengths = tuple(len(example["input_ids"]) for example in plain) if in_one_row else ()
        return marked


@contextmanager
def cut_by_schedule(
    executor: Executor, batches: Sequence[Batch], arguments: Any, ignores: bool
) -> Iterator[list[Batch]]:
    """Yield a step's batches, padded to the number of batches and of rows in ``TrainingArguments``, which the
    pipeline's schedule needs. If the loss ignores labels of -100 (``ignores``), padding rows repeat the last row
    without labels; otherwise no rows are added: see :func:`pieces`.
    """
    count = arguments.gradient_accumulation_steps
    rows = arguments.per_device_train_batch_size
    # Batches of few long rows have as many tokens as batches of many short rows.
    uneven = rebalances(arguments)
    with executor.uncut() if uneven or not ignores else nullcontext():
        if ignores:
            full = [with_rows(batch, 1 if uneven else rows) for batch in batches]
            yield full + [unlabelled(full[-1])] * (count - len(full))
        else:
            yield [*chain(*pieces(executor, batches, count, 1 if uneven else rows))]


def rebalances(arguments: Any) -> bool:
    """Return whether ``TrainingArguments`` request batches of equal cost, whose numbers of rows differ."""
    return arguments.train_sampling_strategy == "batch_rebalance"


def pieces(
    executor: Executor, batches: Sequence[Batch], count: int, rows: int
) -> list[list[Batch]]:
    """Return the microbatches of each of ``count`` batches of ``rows`` rows; the last batches may have fewer, or none.
    This is for losses that ignore no label, where padding rows would count: 3 rows in 4 microbatches become 1 + 1 + 1 +
    0. Run these microbatches inside ``executor.uncut()``.
    """
    parts = len(executor.share_out(blank_batches(rows, count))) // count
    given = [
        *batches,
        *[first_rows(batches[-1], rows_of(batches[-1]), 0)] * (count - len(batches)),
    ]
    return [_cut(batch, rows_of(batch), parts) for batch in given]


def blank_batches(rows: int, count: int = 1) -> list[Batch]:
    """Return ``count`` batches of ``rows`` rows, to find out how an executor splits such batches."""
    row = torch.zeros(rows, 2, dtype=torch.int64)
    return [{"input_ids": row, "labels": row}] * count


def _cut(batch: Batch, rows: int, parts: int) -> list[Batch]:
    if rows == 0:
        return [batch] * parts
    ends = [rows * index // parts for index in range(parts + 1)]
    return [_by_rows(batch, (rows,), itemgetter(slice(*span))) for span in pairwise(ends)]


def first_examples(batch: Batch, known: tuple[int, int], drop: bool = True) -> Batch:
    """Let only ``known[1]`` of ``known[0]`` examples count: drop the other rows, or their labels."""
    (given, own), rows = known, rows_of(batch)
    if own >= given or (rows != given and rows != 1):
        return batch
    if rows == given:
        return first_rows(batch, rows, own) if drop else unlabelled(batch, own)
    lengths = batch.lengths if isinstance(batch, Marked) else []
    return unlabelled(batch, sum(lengths[:own]), dim=1) if len(lengths) == given else batch


def warn_of_repeated(trainer: Any, known: tuple[int, int] | None) -> None:
    """Warn once that ``known[0] - known[1]`` examples count twice in a loss that hfscale does not compute."""
    if (
        known is None
        or known[1] >= known[0]
        or vars(trainer).setdefault("_told_of_repeated", False)
    ):
        return
    vars(trainer)["_told_of_repeated"] = True
    warnings.warn(
        f"all data ranks must get the same number of examples, so {known[0] - known[1]} examples of an epoch's last "
        f"batch are repeated, and the loss of {type(trainer).__name__} counts them twice, as it does over data ranks "
        "in the stock Trainer: use data sets whose examples fill all steps, or dataloader_drop_last=True",
        stacklevel=2,
    )


def first_rows(batch: Batch, has: int, rows: int) -> Batch:
    """Return ``batch`` with the first ``rows`` of its ``has`` rows, possibly none."""
    return batch if rows == has else _by_rows(batch, (has,), lambda value: value[:rows])


def first_of_chunks(batch: Batch, has: int, rows: int) -> Batch:
    """Return ``batch`` with the first ``rows`` of its ``has`` rows. A tensor with ``2 * has`` rows, in which all chosen
    rows precede the rejected rows, keeps the first ``rows`` of each half.
    """
    return _by_rows(
        batch, (has, 2 * has), lambda value: torch.cat([chunk[:rows] for chunk in value.split(has)])
    )


def with_rows(batch: Batch, rows: int) -> Batch:
    """Return ``batch`` with at least ``rows`` rows, repeating the last one without labels."""
    has = rows_of(batch)
    if not 0 < has < rows:
        return batch

    def padded(value: Tensor) -> Tensor:
        return torch.cat(
            (
                value,
                value[-1:].expand(rows - has, *value.shape[1:]),
            )
        )

    more = _by_rows(batch, (has,), padded)
    of_other_rows = {
        name: batch[name] for name in _LABELS if name in batch and more[name] is batch[name]
    }
    return {**unlabelled(more, has), **of_other_rows}


def _by_rows(
    batch: Batch,
    sizes: tuple[int, ...],
    change: Callable[[Tensor], Tensor],
) -> Batch:
    """Return ``batch`` with ``change`` applied to its tensors whose number of rows is in ``sizes``."""
    return {
        name: change(value)
        if isinstance(value, Tensor) and value.ndim and len(value) in sizes
        else value
        for name, value in batch.items()
    }


def unlabelled(batch: Batch, since: int = 0, dim: int = 0, ignored: int = IGNORED) -> Batch:
    """Return ``batch`` with labels of ``ignored``: of all rows, or from index ``since`` on along ``dim``."""
    masked = dict(batch)
    for name in _LABELS:
        if isinstance(batch.get(name), Tensor):
            masked[name] = batch[name].clone()
            masked[name][(slice(None),) * dim + (slice(since, None),)] = ignored
    return masked
