"""Into a region of which every rank computes a part: the gradient is the sum of theirs."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from hfscale.distributed.ops import enter
from hfscale.testing import RankPool

from .pieces import loss, values

SHAPE = (3, 5)


def entered() -> tuple[torch.Tensor, torch.Tensor]:
    x = values(0, *SHAPE).requires_grad_()
    inside = enter(x, dist.group.WORLD)
    loss(inside, values(1 + dist.get_rank(), *SHAPE)).backward()
    return inside.detach(), x.grad


def test_gradients_of_all_ranks_are_summed(pools: Callable[[int], RankPool]) -> None:
    x = values(0, *SHAPE).requires_grad_()
    sum(loss(x, values(1 + rank, *SHAPE)) for rank in range(2)).backward()
    for inside, grad in pools(2).run(entered):
        assert torch.equal(inside, x.detach())
        torch.testing.assert_close(grad, x.grad, rtol=1e-14, atol=1e-14)


def test_one_rank_enters_nothing() -> None:
    x = values(0, *SHAPE)
    assert enter(x, None) is x
