"""A dim put together from the ranks' pieces, of which each then computes with a part: their gradients are summed."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from hfscale.distributed.ops import gather_sum
from hfscale.testing import RankPool, count_traffic

from .pieces import CUTS, loss, piece, values


def gathered(
    shape: tuple[int, ...], dim: int, lengths: Sequence[int], again: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    rank, group = dist.get_rank(), dist.group.WORLD
    own = piece(values(0, *shape), lengths, dim, rank).clone().requires_grad_()
    known = values(0, *shape) if again else None
    with count_traffic() as traffic:
        whole = gather_sum(own, lengths, group, dim, known)
    loss(whole, values(1 + rank, *shape)).backward()
    return whole.detach(), own.grad, sum(traffic.calls.values())


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("shape", "dim", "lengths"), CUTS)
def test_equals_the_whole(
    pools: Callable[[int], RankPool], shape: tuple[int, ...], dim: int, lengths: Sequence[int], again: bool
) -> None:
    """What is known already is not gathered again, and has the same gradient."""
    x = values(0, *shape).requires_grad_()
    sum(loss(x, values(1 + rank, *shape)) for rank in range(2)).backward()
    for rank, (whole, grad, calls) in enumerate(pools(2).run(gathered, shape, dim, lengths, again)):
        assert (calls == 0) == again
        assert torch.equal(whole, x.detach())
        torch.testing.assert_close(grad, piece(x.grad, lengths, dim, rank), rtol=1e-14, atol=1e-14)
