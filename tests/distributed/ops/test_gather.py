"""A dim put together from the ranks' pieces, after which all compute alike."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from hfscale.distributed.ops import gather
from hfscale.testing import RankPool

from .pieces import CUTS, loss, piece, values


def gathered(shape: tuple[int, ...], dim: int, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    own = piece(values(0, *shape), lengths, dim, dist.get_rank()).clone().requires_grad_()
    whole = gather(own, lengths, dist.group.WORLD, dim)
    loss(whole, values(1, *shape)).backward()
    return whole.detach(), own.grad


@pytest.mark.parametrize(("shape", "dim", "lengths"), CUTS)
def test_equals_the_whole(
    pools: Callable[[int], RankPool], shape: tuple[int, ...], dim: int, lengths: Sequence[int]
) -> None:
    x = values(0, *shape).requires_grad_()
    loss(x, values(1, *shape)).backward()
    for rank, (whole, grad) in enumerate(pools(2).run(gathered, shape, dim, lengths)):
        assert torch.equal(whole, x.detach())
        torch.testing.assert_close(grad, piece(x.grad, lengths, dim, rank), rtol=1e-14, atol=1e-14)


def test_one_rank_has_the_whole() -> None:
    x = values(0, 2, 3)
    assert gather(x, [3], None) is x
