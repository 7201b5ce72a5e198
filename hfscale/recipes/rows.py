"""Arrange tokenized examples as rows of a data set, and make a model's forward arguments from these rows."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100  # a token with this label does not count in the loss

_PADDING = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0, "position_ids": 0}
"""Arguments of the model's forward pass that a row may have, each with the value with which rows are padded on the
right.
"""
Columns = dict[str, list[np.ndarray]]


class Rows:
    """Provide the rows of a tokenized data set, in torch format, as microbatches for training or evaluation.

    Rows without a column ``labels`` are trained on all their tokens. Packed rows have a column ``position_ids``; in
    them, each padding token is a document of its own, without a label. Rows of preference pairs and of texts with
    classes are padded with the token ``padding``, by which the model finds the end of a text.
    """

    texts = 1  # rows of a batch per row of the data set

    def __init__(self, data: Dataset, padding: int = 0) -> None:
        self._data = data
        self._padding = padding
        is_packed = "position_ids" in data.column_names
        # Packed rows have no mask, so a router counts their padding: every layout needs the same number of padding
        # tokens.
        self._length = int(self.tokens.max()) if is_packed else 0

    def __len__(self) -> int:
        return len(self._data)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the number of tokens of each row, without padding; of a preference pair, the tokens of both texts."""
        names = [
            name for name in ("input_ids", "chosen", "rejected") if name in self._data.column_names
        ] or ["labels"]
        table = self._data.select_columns(names).with_format("arrow")[:]
        return sum(pyarrow.compute.list_value_length(table[name]).to_numpy() for name in names)  # type: ignore[return-value]

    def costs(self, pair: float) -> np.ndarray:
        """Return the computing cost of each row in units of one token's cost: 1 for each token, and ``pair`` for each
        pair of tokens of the same text, because attention computes a score per pair.
        """
        pairs = self.tokens.astype(float) ** 2
        # A text of n tokens has n^2 pairs, the sum of 2 p + 1 over its positions p < n. So the pairs of a packed row
        # are the same sum over all positions of the row.
        if "position_ids" in self._data.column_names:
            pairs = np.array(
                [(2 * row + 1).sum() for row in self._data.with_format("numpy")["position_ids"]]
            )
        return self.tokens + pair * pairs

    @cached_property
    def labels(self) -> np.ndarray:
        """Return, for each row, the number of labels that count in the loss: 1 for a preference pair or a text with a
        class; otherwise the row's labels, without its first token and ignored tokens.
        """
        if "labels" in self._data.column_names:
            return np.array(
                [
                    int((row[1:] != IGNORED).sum())
                    for row in self._data.with_format("numpy")["labels"]
                ]
            )
        return (
            self.tokens - 1
            if self._data.column_names == ["input_ids"]
            else np.ones(len(self), dtype=np.int64)
        )

    def batch(self, rows: list[int]) -> dict[str, Tensor]:
        """Return the arguments of one forward pass over these rows, padded on the right. Labels are not shifted,
        because transformers shifts them.
        """
        columns: dict[str, Any] = self._data[rows]
        batch = {}
        for name, filler in _PADDING.items():
            if name in columns:
                column = pad_sequence(list(columns[name]), batch_first=True, padding_value=filler)
                batch[name] = pad(
                    column,
                    (0, max(self._length - column.shape[1], 0)),
                    value=filler,
                )
        batch.setdefault("labels", batch["input_ids"].clone())
        return batch

    def step(
        self, rows: list[int], size: int, counted: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Return the microbatches of one step over these rows, of ``size`` rows each. Only the first ``counted`` rows
        (default: all) count in the loss.
        """
        batch = self.batch(rows)
        first = self.texts * (len(rows) if counted is None else counted)
        if "counted" in batch:
            batch["counted"][first:] = False
        else:
            batch["labels"][first:] = IGNORED
        return divided(batch, self.texts * size)

    def _filled(self, texts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Pad tokenized texts on the right to the longest one, and return them with their attention mask."""
        masks = [torch.ones_like(text) for text in texts]
        return {
            "input_ids": pad_sequence(list(texts), batch_first=True, padding_value=self._padding),
            "attention_mask": pad_sequence(masks, batch_first=True, padding_value=0),
        }


class RowBatches(Sequence[dict[str, Tensor]]):
    """Provide all rows of several data sets as a sequence of batches of ``size`` rows, made on demand. The last batch
    of each data set is filled up with rows from its beginning.
    """

    def __init__(self, every: Sequence[Rows], size: int) -> None:
        self._starts = [(rows, at) for rows in every for at in range(0, len(rows), size)]
        self._size = size

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, place: Any) -> Any:
        rows, at = self._starts[place]
        return rows.batch([index % len(rows) for index in range(at, at + self._size)])


class PairRows(Rows):
    """Provide preference pairs as batches in which preferred and rejected texts alternate. The argument ``counted``
    holds, for each text, whether its pair counts in the loss (``False`` for pairs that only fill up a batch).
    """

    texts = 2

    def batch(self, rows: list[int]) -> dict[str, Tensor]:
        """Return the arguments of one forward pass over these preference pairs, two padded texts per pair."""
        columns: dict[str, Any] = self._data[rows]
        texts = [
            text
            for pair in zip(columns["chosen"], columns["rejected"], strict=True)
            for text in pair
        ]
        return {
            **self._filled(texts),
            "counted": torch.ones(len(texts), dtype=torch.bool),
        }


class ClassRows(Rows):
    """Provide texts with one class each as batches, padded on the right to the longest text."""

    def batch(self, rows: list[int]) -> dict[str, Tensor]:
        """Return the arguments of one forward pass over these texts, padded, with the number of a class as each text's
        label.
        """
        columns: dict[str, Any] = self._data[rows]
        return {**self._filled(columns["input_ids"]), "labels": columns["label"].clone()}


def divided(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Split the arguments of a step into microbatches of ``size`` rows. All microbatches have the same number of tokens
    per row, so that a pipeline may split them again.
    """
    rows = len(batch["input_ids"])
    return [
        {name: value[start : start + size] for name, value in batch.items()}
        for start in range(0, rows, size)
    ]


class Example(NamedTuple):
    """Hold the tokens of a training example and a label for each: the token itself, or :data:`IGNORED` if the token
    does not count in the loss.
    """

    input_ids: list[int]
    labels: list[int]


def cut(examples: Sequence[Example], length: int) -> tuple[list[Example], int, int]:
    """Truncate examples to ``length`` tokens, and drop those that have no label left. Return the remaining examples,
    the number of truncated ones among them, and the number of dropped ones.

    The first token of each example gets no label: in a packed row, it would be predicted from the preceding example.
    """
    kept = []
    shortened = 0
    for ids, labels in examples:
        example = Example(ids[:length], [IGNORED, *labels[1:length]])
        if any(label != IGNORED for label in example.labels):
            kept.append(example)
            shortened += len(ids) > length
    return kept, shortened, len(examples) - len(kept)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign examples of these ``lengths`` to rows of ``capacity`` tokens: each example goes to the first row that has
    enough room left. Return, for each row, the indices of its examples.
    """
    # A binary tree with at least as many leaves as examples. A leaf holds the room left in one row, and an inner node
    # the maximum of its leaves, so that the first row with enough room is found from the root.
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    rows: list[list[int]] = [[] for _ in range(leaves)]
    for index, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        rows[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [row for row in rows if row]


def packed_rows(examples: Sequence[Example], length: int) -> Columns:
    """Pack examples into rows of at most ``length`` tokens without splitting any. ``position_ids`` restart at each
    example, by which transformers' attention keeps the examples of a row apart.
    """
    rows = [
        [examples[index] for index in row]
        for row in first_fit([len(example.input_ids) for example in examples], length)
    ]
    return {
        "input_ids": [_joined(example.input_ids for example in row) for row in rows],
        "labels": [_joined([IGNORED, *example.labels[1:]] for example in row) for row in rows],
        "position_ids": [_joined(range(len(example.input_ids)) for example in row) for row in rows],
    }


def separate_rows(examples: Sequence[Example]) -> Columns:
    """Return columns of rows with one example each, not padded: tokens, labels, and an attention mask of ones."""
    return {
        "input_ids": [_joined([example.input_ids]) for example in examples],
        "labels": [_joined([[IGNORED, *example.labels[1:]]]) for example in examples],
        "attention_mask": [np.ones(len(example.input_ids), dtype=np.int8) for example in examples],
    }


def _joined(pieces: Iterable[Sequence[int]]) -> np.ndarray:
    return np.concatenate([np.asarray(piece, dtype=np.int32) for piece in pieces])
