"""Dispatch, experts, combine: a loop over tokens and experts, with gradients, and what it sends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hfscale.distributed.ops.grouped_linear import grouped_linear
from hfscale.parallel.experts.dispatch import combine, dispatch, plan_routes
from hfscale.testing import RankPool, Traffic, count_traffic

Pools = Callable[[int], RankPool]
H = 5


def mixture(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    index: Tensor,
    count: int,
    group: Any = None,
    batches: int = 1,
) -> Tensor:
    """Square, through this rank's ``experts [e, h, h]``, square again: not linear, so that an order matters."""
    routes, _ = plan_routes(index, count, group)
    rows = dispatch(x, routes, batches)
    return combine(
        grouped_linear(rows.square(), experts, routes.counts).square(),
        weights,
        routes,
        batches,
    )


def loop(x: Tensor, weights: Tensor, experts: Tensor, index: Tensor) -> Tensor:
    """The same for each token and each of its routes."""
    out = []
    for token, row in enumerate(x):
        total = 0 * row * weights.sum()  # it has gradients, if only of zero
        for route, expert in enumerate(index[token].tolist()):
            if expert < len(experts):
                total = total + weights[token, route] * (experts[expert] @ row.square()).square()
        out.append(total)
    return torch.stack(out) if out else x * weights.sum()


def inputs(n: int, k: int, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, H), (n, k), (count, H, H))
    x, weights, experts = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return x.requires_grad_(), weights.requires_grad_(), experts.requires_grad_()


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(0, 6),
    k=st.integers(1, 3),
    count=st.integers(1, 5),
    may_drop=st.booleans(),
    seed=st.integers(0, 999),
)
def test_equals_a_loop(n: int, k: int, count: int, may_drop: bool, seed: int) -> None:
    leaves = inputs(n, k, count, seed)
    index = torch.randint(
        0, count + may_drop, (n, k), generator=torch.Generator().manual_seed(seed)
    )
    found = mixture(*leaves, index, count)
    expected = loop(*leaves, index)
    torch.testing.assert_close(found, expected)
    grad = torch.randn(
        found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    theirs = torch.autograd.grad(expected, leaves, grad, allow_unused=True, materialize_grads=True)
    for ours, wanted in zip(torch.autograd.grad(found, leaves, grad), theirs, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("drop", [False, True])
def test_gradients(k: int, drop: bool) -> None:
    index = torch.randint(0, 4 + drop, (5, k), generator=torch.Generator().manual_seed(k))
    assert torch.autograd.gradcheck(
        lambda *leaves: mixture(*leaves, index, 4), inputs(5, k, 4, seed=1)
    )


@pytest.mark.parametrize(
    "trains", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)]
)
def test_frozen(trains: tuple[int, int, int]) -> None:
    """Experts, router, or what is in front of both do not train: the others' gradients stay what they are."""
    index = torch.tensor([[0, 2], [1, 2], [2, 0]])
    free = inputs(3, 2, 4, seed=2)
    wanted = torch.autograd.grad(mixture(*free, index, 4).sum(), free)
    leaves = [leaf.detach().requires_grad_(bool(on)) for leaf, on in zip(free, trains, strict=True)]
    mixture(*leaves, index, 4).sum().backward()  # type: ignore[arg-type]
    for leaf, gradient, on in zip(leaves, wanted, trains, strict=True):
        assert (leaf.grad is not None) == bool(on)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, gradient)


def test_gradients_of_experts_are_divided_by_the_distinct_batches() -> None:
    """What the data axes do not average is divided on the way in, and put back for what they do."""
    index = torch.tensor([[0, 1], [1, 3]])
    leaves = inputs(2, 2, 4, seed=3)
    alone, shared = (
        torch.autograd.grad(mixture(*leaves, index, 4, batches=b).sum(), leaves) for b in (1, 4)
    )
    for before, after, factor in zip(alone, shared, (1, 1, 4), strict=True):
        torch.testing.assert_close(after * factor, before)


def test_routes_that_go_nowhere() -> None:
    x, weights, experts = inputs(3, 2, 4, seed=4)
    out = mixture(x, weights, experts, torch.tensor([[4, 4], [0, 4], [1, 2]]), 4)
    out.sum().backward()
    assert weights.grad is not None
    assert x.grad is not None
    assert torch.equal(out[0], torch.zeros(H))
    assert (weights.grad == 0).tolist() == [[True, True], [False, True], [False, False]]
    assert torch.equal(x.grad[0], torch.zeros(H))


def on_ranks(indices: list[Tensor], k: int, count: int, seed: int) -> tuple[list[Tensor], Traffic]:
    """This rank's output and gradients, and what it sent."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    x, weights, experts = _of_rank(indices, k, count, seed, rank)
    own = (
        experts.detach()[rank * count // size : (rank + 1) * count // size].clone().requires_grad_()
    )
    with count_traffic() as traffic:
        out = mixture(x, weights, own, indices[rank], count, dist.group.WORLD)
        (out * (rank + 1)).sum().backward()
    gradients = [leaf.grad for leaf in (x, weights, own)]
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)], traffic


def _of_rank(
    indices: list[Tensor], k: int, count: int, seed: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    x, weights, _ = inputs(len(indices[rank]), k, count, seed + rank)
    return x, weights, inputs(0, k, count, seed)[2]


def _random(count: int, k: int, lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(0, count, (n, k), generator=generator) for n in lengths]


RANKED = {
    "random": _random(8, 2, [6, 3, 1, 5]),
    "ranks without tokens": _random(8, 2, [0, 3, 0, 5]),
    "no token at all": _random(8, 2, [0, 0, 0, 0]),
    "experts of one rank only": [torch.tensor([[6, 7]]).expand(3, 2).contiguous()] * 4,
    "some go nowhere": [index.masked_fill(index > 5, 8) for index in _random(8, 2, [6, 3, 1, 5])],
}


@pytest.mark.parametrize("name", RANKED)
def test_ranks(pools: Pools, name: str) -> None:
    """As if one rank had every token: outputs, and gradients of experts summed over all senders."""
    indices = RANKED[name]
    count = 8
    k = 2
    parts = [_of_rank(indices, k, count, 9, rank) for rank in range(4)]
    experts = parts[0][2]
    outputs = [
        loop(x, weights, experts, index)
        for (x, weights, _), index in zip(parts, indices, strict=True)
    ]
    total = sum((out * (rank + 1)).sum() for rank, out in enumerate(outputs))
    assert isinstance(total, Tensor)
    total.backward()
    gradient = torch.zeros_like(experts) if experts.grad is None else experts.grad
    found = pools(4).run(on_ranks, indices, k, count, 9)
    for rank, ((out, of_x, of_weights, of_own), _) in enumerate(found):
        x, weights, _ = parts[rank]
        torch.testing.assert_close(out, outputs[rank].detach())
        torch.testing.assert_close(of_x, x.grad)
        torch.testing.assert_close(of_weights, weights.grad)
        torch.testing.assert_close(of_own, gradient[rank * 2 : rank * 2 + 2])


@pytest.mark.parametrize("name", RANKED)
def test_what_is_sent(pools: Pools, name: str) -> None:
    """Each row four times, ``h`` numbers each time; besides, how many rows there are."""
    # bytes
    indices = RANKED[name]
    count = 8
    size = 8
    chosen = [index.flatten()[index.flatten() < count] for index in indices]
    for rank, (_, traffic) in enumerate(pools(4).run(on_ranks, indices, 2, count, 9)):
        leaving = len(chosen[rank])
        arriving = sum(int((c // 2 == rank).sum()) for c in chosen)
        assert traffic.calls == {"alltoall": 5}
        assert traffic.payload == {"alltoall": 2 * (leaving + arriving) * H * size + count * 8}


def poisoned(indices: list[Tensor], k: int, count: int, seed: int) -> list[Tensor]:
    """The same where uninitialized memory is NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(2).isnan().all()
    try:
        return on_ranks(indices, k, count, seed)[0]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", RANKED)
def test_uninitialized_memory_is_never_read(pools: Pools, name: str) -> None:
    """Trap T11."""
    expected = pools(4).run(on_ranks, RANKED[name], 2, 8, 9)
    for found, (plain, _) in zip(
        pools(4).run(poisoned, RANKED[name], 2, 8, 9), expected, strict=True
    ):
        for tensor, wanted in zip(found, plain, strict=True):
            assert torch.equal(tensor, wanted)
