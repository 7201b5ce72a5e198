"""Out of a region of which every rank has computed a part: the sum, whose gradient every part gets."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from hfscale.distributed.ops import leave
from hfscale.testing import RankPool

from .pieces import loss, values

SHAPE = (3, 5)


def left() -> tuple[torch.Tensor, torch.Tensor]:
    part = values(dist.get_rank(), *SHAPE).requires_grad_()
    whole = leave(part, dist.group.WORLD)
    loss(whole, values(9, *SHAPE)).backward()
    return whole.detach(), part.grad


def test_parts_are_summed(pools: Callable[[int], RankPool]) -> None:
    parts = [values(rank, *SHAPE).requires_grad_() for rank in range(2)]
    whole = parts[0] + parts[1]
    loss(whole, values(9, *SHAPE)).backward()
    for rank, (found, grad) in enumerate(pools(2).run(left)):
        torch.testing.assert_close(found, whole.detach(), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(grad, parts[rank].grad, rtol=1e-14, atol=1e-14)


def test_one_rank_leaves_nothing() -> None:
    part = values(0, *SHAPE)
    assert leave(part, None) is part
