"""Ids and targets of tokens further ahead."""

import pytest
import torch

from hfscale.features.prediction.look_ahead import look_ahead

ROW = torch.tensor([[1, 2, 3, 4, 5, 6]])


def found(depths: int, **batch: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    ids, targets = look_ahead({"input_ids": ROW, **batch}, depths, 1)
    return ids[0].tolist(), targets[0].tolist()


def test_a_row() -> None:
    ids, targets = found(2, labels=ROW)
    assert ids == [[2, 3, 4, 5, 6, 0], [3, 4, 5, 6, 0, 0]]
    assert targets == [[3, 4, 5, 6, -100, -100], [4, 5, 6, -100, -100, -100]]


def test_shifted_labels_are_targets_already() -> None:
    assert found(1, shift_labels=ROW + 1)[1] == [[3, 4, 5, 6, 7, -100]]


def test_ignored_labels() -> None:
    assert found(1, labels=ROW.masked_fill(ROW == 4, -100))[1] == [[3, -100, 5, 6, -100, -100]]


@pytest.mark.parametrize("padded", [False, True])
def test_documents(padded: bool) -> None:
    """Of four and two tokens: nothing is predicted past the end of the first, whatever its labels are."""
    batch = {"labels": ROW, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]])}
    if padded:
        batch["attention_mask"] = torch.ones_like(ROW)
    assert found(2, **batch)[1] == [[3, 4, -100, -100, -100, -100], [4, *[-100] * 5]]


def test_more_depths_than_tokens() -> None:
    short = {
        "input_ids": ROW[:, :1],
        "labels": ROW[:, :1],
        "position_ids": torch.zeros(1, 1, dtype=torch.int64),
    }
    ids, targets = look_ahead(short, 3, 1)
    assert ids.tolist() == [[[0]] * 3]
    assert targets.tolist() == [[[-100]] * 3]
