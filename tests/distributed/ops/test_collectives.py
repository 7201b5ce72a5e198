"""What happens to values and gradients at the edges of regions that several ranks compute together."""

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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


def product(rank: int) -> Tensor:
    """A partial sum that autograd has just computed."""
    return values(rank, *SHAPE).requires_grad_() @ values(7, SHAPE[1], SHAPE[1])


def keeping(keep: Callable[[Tensor], Tensor]) -> Callable[[Tensor, list[Tensor]], Tensor]:
    def read(x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(keep(x))
        return x

    return read


PARTS: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "fresh": lambda x, _: x,
    "fresh view": lambda x, _: x.view(-1, *SHAPE),
    "saved": keeping(Tensor.square),
    "saved result": lambda x, _: x.sigmoid(),
    "view held": keeping(lambda x: x[1:]),
    "base saved": lambda x, kept: keeping(Tensor.square)(x, kept).view(-1, *SHAPE),
    "turned": lambda x, _: x.t(),
    "leaf": lambda x, _: x.detach().requires_grad_(),
    "constant": lambda x, _: x.detach(),
}


def summed_parts(name: str) -> tuple[int, Tensor, Tensor, bool]:
    """Copies that the sum made, the sum, the part, and whether all that reads the part is as it was without a sum."""
    kept, without = list[Tensor](), list[Tensor]()
    part = PARTS[name](product(dist.get_rank()), kept)
    again = PARTS[name](product(dist.get_rank()), without)
    with mock.patch.object(collectives, "_copied", wraps=collectives._copied) as copies:
        whole = collectives.reduce_from_tp_region(part, dist.group.WORLD)
    for each in kept:
        each.sum().backward()  # raises if what it saved was overwritten
    whole += 1  # as stock code may
    same = all(map(torch.equal, kept, without))
    return copies.call_count, whole.detach(), again.detach(), same


@pytest.mark.parametrize("name", PARTS)
def test_a_sum_takes_the_memory_of_what_nothing_else_holds(pools: Pools, name: str) -> None:
    ranks = pools(2).run(summed_parts, name)
    expected = sum(part for _, _, part, _ in ranks) + 1
    for copies, whole, _, same in ranks:
        assert copies == (not name.startswith("fresh"))
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-14)
        assert same


def mean_square(x: Tensor) -> Tensor:
    return (x @ values(8, SHAPE[1], SHAPE[1])).square().mean()


GRADIENTS: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "fresh": lambda x, _: mean_square(x),
    "fresh view": lambda x, _: mean_square(x.view(1, *SHAPE)),
    "fresh sum": lambda x, _: mean_square(x) + mean_square(2 * x),
    "shared": lambda x, kept: mean_square(x + kept[0]),
    "held by a hook": lambda x, kept: (x.register_hook(kept.append), mean_square(x))[1],
    "expanded": lambda x, _: x.sum(),
}


def summed_gradients(name: str) -> tuple[int, Tensor, Tensor, list[Tensor]]:
    """Copies that the sum made, the gradient, what it is a sum of, and gradients that something else holds."""
    x, other = (values(dist.get_rank(), *SHAPE).requires_grad_() for _ in range(2))
    kept = [other * 1]
    inside = collectives.copy_to_tp_region(x * 1, dist.group.WORLD)
    value = GRADIENTS[name](inside, kept)
    with mock.patch.object(collectives, "_copied", wraps=collectives._copied) as copies:
        value.backward()
    plain = values(dist.get_rank(), *SHAPE).requires_grad_()
    GRADIENTS[name](plain * 1, [other.detach()]).backward()
    held = [each for each in (other.grad, *kept[1:]) if each is not None]
    return copies.call_count, x.grad, plain.grad, held


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_is_summed_in_place_where_nothing_else_holds_it(pools: Pools, name: str) -> None:
    ranks = pools(2).run(summed_gradients, name)
    for copies, found, own, held in ranks:
        assert copies == (not name.startswith("fresh"))
        torch.testing.assert_close(found, sum(other[2] for other in ranks), rtol=0, atol=1e-14)
        assert len(held) == (name in ("shared", "held by a hook"))
        assert all(torch.equal(each, own) for each in held)


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
