"""A dim that all ranks have computed alike, cut over them."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from hfscale.distributed.ops import scatter
from hfscale.testing import RankPool

from .pieces import CUTS, loss, piece, values


def scattered(shape: tuple[int, ...], dim: int, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    whole = values(0, *shape).requires_grad_()
    own = scatter(whole, lengths, dist.group.WORLD, dim)
    assert own.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()  # so that the whole can be given up
    loss(own, piece(values(1, *shape), lengths, dim, rank)).backward()
    return own.detach(), whole.grad


@pytest.mark.parametrize(("shape", "dim", "lengths"), CUTS)
def test_equals_the_whole(
    pools: Callable[[int], RankPool], shape: tuple[int, ...], dim: int, lengths: Sequence[int]
) -> None:
    x = values(0, *shape).requires_grad_()
    loss(x, values(1, *shape)).backward()
    for rank, (own, grad) in enumerate(pools(2).run(scattered, shape, dim, lengths)):
        assert torch.equal(own, piece(x.detach(), lengths, dim, rank))
        torch.testing.assert_close(grad, x.grad, rtol=1e-14, atol=1e-14)
