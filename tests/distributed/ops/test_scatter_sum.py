"""Parts of a sum, summed and cut over ranks along a dim."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from hfscale.distributed.ops import scatter_sum
from hfscale.testing import RankPool

from .pieces import CUTS, loss, piece, values


def scattered(shape: tuple[int, ...], dim: int, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    part = values(rank, *shape).requires_grad_()
    own = scatter_sum(part, lengths, dist.group.WORLD, dim)
    loss(own, piece(values(9, *shape), lengths, dim, rank)).backward()
    return own.detach(), part.grad


@pytest.mark.parametrize(("shape", "dim", "lengths"), CUTS)
def test_equals_the_sum(
    pools: Callable[[int], RankPool], shape: tuple[int, ...], dim: int, lengths: Sequence[int]
) -> None:
    parts = [values(rank, *shape).requires_grad_() for rank in range(2)]
    whole = parts[0] + parts[1]
    loss(whole, values(9, *shape)).backward()
    for rank, (own, grad) in enumerate(pools(2).run(scattered, shape, dim, lengths)):
        torch.testing.assert_close(own, piece(whole.detach(), lengths, dim, rank), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(grad, parts[rank].grad, rtol=1e-14, atol=1e-14)
