"""Head and cross entropy in one, over a vocabulary that two ranks share unevenly: torch's own over all logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hfscale.distributed.ops.head_cross_entropy import LinearRows, head_cross_entropy
from hfscale.distributed.ops.vocab_cross_entropy import VocabularySlice
from hfscale.testing import RankPool

from .pieces import piece, values

ROWS = 9
HIDDEN = 4
LENGTHS = (5, 2)
OPTIONS: list[dict[str, Any]] = [{}, {"divisor": 5}, {"valid": 6}]


def _case(rank: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, weight, targets of which three are ignored; a rank has its rows of the weight."""
    targets = torch.randint(sum(LENGTHS), (ROWS,), generator=torch.Generator().manual_seed(2))
    targets[[1, 4, 8]] = -100
    weight = values(1, sum(LENGTHS), HIDDEN)
    own = weight if rank is None else piece(weight, LENGTHS, 0, rank).clone()
    return values(0, ROWS, HIDDEN).requires_grad_(), own.requires_grad_(), targets


def computed(options: dict[str, Any], smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    rank = dist.get_rank()
    hidden, weight, targets = _case(rank)
    vocabulary = VocabularySlice(
        sum(LENGTHS[:rank]), sum(LENGTHS), max(LENGTHS), dist.group.WORLD, smoothing
    )
    head = LinearRows(weight, None, None, reusable=True, needed=True)
    loss = head_cross_entropy(hidden, targets, head, vocabulary=vocabulary, **options)
    (3 * loss).backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("options", OPTIONS, ids=["mean", "divisor", "valid"])
def test_two_ranks_equal_torch(
    pools: Callable[[int], RankPool], options: dict[str, Any], smoothing: float
) -> None:
    hidden, weight, targets = _case(None)
    total = F.cross_entropy(hidden @ weight.T, targets, reduction="sum", label_smoothing=smoothing)
    expected = total / options.get("divisor", 6)
    (3 * expected).backward()
    found = pools(2).run(computed, options, smoothing)
    by_hidden = sum(rank[1] for rank in found)  # each rank's is what its slice contributes
    torch.testing.assert_close(by_hidden, hidden.grad, rtol=1e-13, atol=1e-13)
    for rank, (loss, _, by_weight) in enumerate(found):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(
            by_weight, piece(weight.grad, LENGTHS, 0, rank), rtol=1e-13, atol=1e-13
        )
