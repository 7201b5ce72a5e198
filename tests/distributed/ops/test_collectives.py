"""What happens to values and gradients at the edges of regions that several ranks compute together."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from hfscale.distributed.ops import collectives
from hfscale.testing import RankPool, count_traffic

from .pieces import CUTS, loss, piece, values

Pools = Callable[[int], RankPool]
SHAPE = (3, 5)
cuts = pytest.mark.parametrize(("shape", "dim", "lengths"), CUTS)


def copied() -> tuple[torch.Tensor, torch.Tensor]:
    x = values(0, *SHAPE).requires_grad_()
    inside = collectives.copy_to_tp_region(x, dist.group.WORLD)
    loss(inside, values(1 + dist.get_rank(), *SHAPE)).backward()
    return inside.detach(), x.grad


def test_gradients_of_a_copy_are_summed(pools: Pools) -> None:
    x = values(0, *SHAPE).requires_grad_()
    sum(loss(x, values(1 + rank, *SHAPE)) for rank in range(2)).backward()
    for inside, grad in pools(2).run(copied):
        assert torch.equal(inside, x.detach())
        torch.testing.assert_close(grad, x.grad, rtol=1e-14, atol=1e-14)


def reduced() -> tuple[torch.Tensor, torch.Tensor]:
    part = values(dist.get_rank(), *SHAPE).requires_grad_()
    whole = collectives.reduce_from_tp_region(part, dist.group.WORLD)
    loss(whole, values(9, *SHAPE)).backward()
    return whole.detach(), part.grad


def test_parts_are_summed(pools: Pools) -> None:
    parts = [values(rank, *SHAPE).requires_grad_() for rank in range(2)]
    whole = parts[0] + parts[1]
    loss(whole, values(9, *SHAPE)).backward()
    for rank, (found, grad) in enumerate(pools(2).run(reduced)):
        torch.testing.assert_close(found, whole.detach(), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(grad, parts[rank].grad, rtol=1e-14, atol=1e-14)


def gathered(
    shape: tuple[int, ...], dim: int, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    own = piece(values(0, *shape), lengths, dim, dist.get_rank()).clone().requires_grad_()
    whole = collectives.gather_from_tp_region(own, lengths, dist.group.WORLD, dim)
    loss(whole, values(1, *shape)).backward()
    return whole.detach(), own.grad


@cuts
def test_gathering_for_equal_computations(
    pools: Pools, shape: tuple[int, ...], dim: int, lengths: Sequence[int]
) -> None:
    x = values(0, *shape).requires_grad_()
    loss(x, values(1, *shape)).backward()
    for rank, (whole, grad) in enumerate(pools(2).run(gathered, shape, dim, lengths)):
        assert torch.equal(whole, x.detach())
        torch.testing.assert_close(grad, piece(x.grad, lengths, dim, rank), rtol=1e-14, atol=1e-14)


def gathered_for_parts(
    shape: tuple[int, ...], dim: int, lengths: Sequence[int], again: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    rank = dist.get_rank()
    group = dist.group.WORLD
    own = piece(values(0, *shape), lengths, dim, rank).clone().requires_grad_()
    known = values(0, *shape) if again else None
    with count_traffic() as traffic:
        whole = collectives.gather_from_sequence_region(own, lengths, group, dim, known)
    loss(whole, values(1 + rank, *shape)).backward()
    return whole.detach(), own.grad, sum(traffic.calls.values())


@pytest.mark.parametrize("again", [False, True])
@cuts
def test_gathering_for_different_computations(
    pools: Pools, shape: tuple[int, ...], dim: int, lengths: Sequence[int], again: bool
) -> None:
    """What is known already is not gathered again, and has the same gradient."""
    x = values(0, *shape).requires_grad_()
    sum(loss(x, values(1 + rank, *shape)) for rank in range(2)).backward()
    for rank, (whole, grad, calls) in enumerate(
        pools(2).run(gathered_for_parts, shape, dim, lengths, again)
    ):
        assert (calls == 0) == again
        assert torch.equal(whole, x.detach())
        torch.testing.assert_close(grad, piece(x.grad, lengths, dim, rank), rtol=1e-14, atol=1e-14)


def scattered(
    shape: tuple[int, ...], dim: int, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    whole = values(0, *shape).requires_grad_()
    own = collectives.scatter_to_tp_region(whole, lengths, dist.group.WORLD, dim)
    # So that the whole can be given up.
    assert own.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    loss(own, piece(values(1, *shape), lengths, dim, rank)).backward()
    return own.detach(), whole.grad


@cuts
def test_cutting_a_tensor(
    pools: Pools, shape: tuple[int, ...], dim: int, lengths: Sequence[int]
) -> None:
    x = values(0, *shape).requires_grad_()
    loss(x, values(1, *shape)).backward()
    for rank, (own, grad) in enumerate(pools(2).run(scattered, shape, dim, lengths)):
        assert torch.equal(own, piece(x.detach(), lengths, dim, rank))
        torch.testing.assert_close(grad, x.grad, rtol=1e-14, atol=1e-14)


def summed_and_cut(
    shape: tuple[int, ...], dim: int, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    part = values(rank, *shape).requires_grad_()
    own = collectives.reduce_scatter_to_sequence_region(part, lengths, dist.group.WORLD, dim)
    loss(own, piece(values(9, *shape), lengths, dim, rank)).backward()
    return own.detach(), part.grad


@cuts
def test_summing_and_cutting(
    pools: Pools, shape: tuple[int, ...], dim: int, lengths: Sequence[int]
) -> None:
    parts = [values(rank, *shape).requires_grad_() for rank in range(2)]
    whole = parts[0] + parts[1]
    loss(whole, values(9, *shape)).backward()
    for rank, (own, grad) in enumerate(pools(2).run(summed_and_cut, shape, dim, lengths)):
        torch.testing.assert_close(
            own, piece(whole.detach(), lengths, dim, rank), rtol=1e-14, atol=1e-14
        )
        torch.testing.assert_close(grad, parts[rank].grad, rtol=1e-14, atol=1e-14)


def test_one_rank_does_nothing() -> None:
    x = values(0, *SHAPE)
    assert collectives.copy_to_tp_region(x, None) is x
    assert collectives.reduce_from_tp_region(x, None) is x
    assert collectives.gather_from_tp_region(x, [3], None) is x
