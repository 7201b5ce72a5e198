"""Put tokenized examples into rows: several per row, separated by their positions, or one per row."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .rows import IGNORED

Columns = dict[str, list[np.ndarray]]


class Example(NamedTuple):
    """Hold an example's tokens and labels: the token itself, or :data:`IGNORED` if it does not count in the loss."""

    input_ids: list[int]
    labels: list[int]


def cut(examples: Sequence[Example], length: int) -> tuple[list[Example], int, int]:
    """Cut examples to ``length`` tokens, and drop those left without a label; return the examples, how many lost
    tokens, and how many were left out. Nothing predicts an example's first token, so its label is ignored: also behind
    another example in the same row.
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
    """Assign examples to rows of ``capacity`` tokens, each to the first with enough room; return indices per row."""
    # A binary tree over as many rows as there are examples: leaves hold the room left in each row, and a node the most
    # of those below it, so that the first row with enough room is found from the root.
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
    """Pack whole examples into rows of at most ``length`` tokens. Positions restart at every example: given such
    positions and no attention mask, transformers keeps attention within the examples.
    """
    rows = first_fit([len(example.input_ids) for example in examples], length)
    return {
        "input_ids": [_joined([examples[index].input_ids for index in row]) for row in rows],
        "labels": [_joined([[IGNORED, *examples[index].labels[1:]] for index in row]) for row in rows],
        "position_ids": [_joined([range(len(examples[index].input_ids)) for index in row]) for row in rows],
    }


def separate_rows(examples: Sequence[Example]) -> Columns:
    """Return one example per row, padded on the right, with the attention mask of its tokens."""
    return {
        "input_ids": [_joined([example.input_ids]) for example in examples],
        "labels": [_joined([[IGNORED, *example.labels[1:]]]) for example in examples],
        "attention_mask": [np.ones(len(example.input_ids), dtype=np.int8) for example in examples],
    }


def _joined(pieces: Sequence[Sequence[int]]) -> np.ndarray:
    return np.concatenate([np.asarray(piece, dtype=np.int32) for piece in pieces])
