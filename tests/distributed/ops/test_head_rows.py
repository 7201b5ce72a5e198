"""Heads run on some rows at a time: the gradients of plain autograd over all rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hfscale.distributed.ops.head_cross_entropy import AnyRows, LinearRows

from .pieces import loss, values

ROWS = 7
HIDDEN = 4
VOCABULARY = 6
CHUNKS = (3, 4)
Finish = Callable[[Tensor], Tensor] | None


def _capped(logits: Tensor) -> Tensor:
    return 2 * torch.tanh(logits / 2)


def _head(kind: str, weight: Tensor, bias: Tensor | None, finish: Finish, needed: bool) -> Any:
    if kind == "linear":
        return LinearRows(weight, bias, finish, reusable=False, needed=needed)
    parameters = [weight] if bias is None else [weight, bias]
    return AnyRows(lambda rows: F.linear(rows, weight, bias), parameters, finish, needed)


@pytest.mark.parametrize("kind", ["linear", "any"])
@pytest.mark.parametrize("finish", [None, _capped])
@pytest.mark.parametrize(
    ("biased", "trains", "needed"), [(False, True, True), (True, True, False), (True, False, True)]
)
def test_chunks_add_up(kind: str, finish: Finish, biased: bool, trains: bool, needed: bool) -> None:
    rows = values(0, ROWS, HIDDEN)
    weights = values(3, ROWS, VOCABULARY)
    weight = values(1, VOCABULARY, HIDDEN).requires_grad_(trains)
    bias = values(2, VOCABULARY).requires_grad_() if biased else None
    leaf = rows.clone().requires_grad_(needed)
    logits = F.linear(leaf, weight, bias)
    loss(finish(logits) if finish else logits, weights).backward()

    head = _head(kind, weight, bias, finish, needed)
    by_rows = []
    with torch.no_grad():
        for chunk, its_weights in zip(rows.split(CHUNKS), weights.split(CHUNKS), strict=True):
            found = head.logits(chunk.clone(), True)
            assert not found.requires_grad
            by_rows.append(head.backward(found.cos() * its_weights))
    if needed:
        torch.testing.assert_close(torch.cat(by_rows), leaf.grad, rtol=1e-13, atol=1e-13)
    else:
        assert by_rows == [None, None]
    for parameter, found in zip(head.parameters, head.sums(), strict=True):
        assert (found is None) == (parameter.grad is None)
        if found is not None:
            torch.testing.assert_close(found, parameter.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", ["linear", "any"])
def test_no_rows_are_gradients_of_zero(kind: str) -> None:
    weight = values(1, VOCABULARY, HIDDEN).requires_grad_()
    (total,) = _head(kind, weight, None, None, True).sums()
    assert torch.equal(total, torch.zeros_like(weight))
