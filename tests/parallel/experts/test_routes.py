"""Every token arrives at the experts chosen for it, and comes back to its place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hfscale.parallel.experts.dispatch import Routes, plan_routes
from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]


def travel(index: Tensor, count: int, group: dist.ProcessGroup | None) -> tuple[Routes, Tensor]:
    """Rows that say who they are - (rank, token, expert) - at the experts; they came back as they left."""
    rank = 0 if group is None else dist.get_rank(group)
    routes, counts = plan_routes(index, count, group)
    n, k = index.shape
    named = torch.stack(
        (torch.full((n, k), rank), torch.arange(n).unsqueeze(1).expand(n, k), index), dim=-1
    ).double()  # [n, k, 3]
    kept = index < count
    rows = named.flatten(0, 1).index_select(0, routes.order)
    assert torch.equal(rows[:, 1].long(), routes.tokens)
    arrived = routes.to_experts(rows)
    back = routes.from_experts(arrived)
    assert torch.equal(back, rows)
    weights = torch.rand(n, k, dtype=torch.float64)
    plain = (named * kept.unsqueeze(-1)).sum(1)
    weighted = (named * (kept * weights).unsqueeze(-1)).sum(1)
    # On a CPU, and what GPUs do.
    for sums in (
        routes.sum_by_token,
        routes.added_up,
        routes.gathered,
    ):
        assert torch.equal(sums(back, None), plain)
        torch.testing.assert_close(sums(back, weights), weighted)
    assert torch.equal(routes.places.flatten()[routes.order], torch.arange(len(routes.order)))
    chosen = index.flatten()[index.flatten() < count]
    assert (
        torch.as_tensor(counts).flatten().tolist()
        == torch.bincount(chosen, minlength=count).tolist()
    )
    return routes, arrived


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(0, 9),
    k=st.integers(1, 4),
    count=st.integers(1, 6),
    may_drop=st.booleans(),
    seed=st.integers(0, 999),
)
def test_one_rank(n: int, k: int, count: int, may_drop: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, count + may_drop, (n, k), generator=generator)
    routes, arrived = travel(index, count, None)
    chosen = index.flatten()[index.flatten() < count]
    assert arrived[:, 2].long().tolist() == sorted(chosen.tolist())
    assert list(routes.counts) == torch.bincount(chosen, minlength=count).tolist()
    # of one expert, in the order of tokens: sums over them do not depend on how the sort went
    for expert in range(count):
        tokens = arrived[arrived[:, 2] == expert][:, 1]
        assert torch.equal(tokens, tokens.sort().values)


def on_ranks(indices: list[Tensor], count: int) -> tuple[list[int], Tensor]:
    routes, arrived = travel(indices[dist.get_rank()], count, dist.group.WORLD)
    assert sum(routes.receive) == sum(routes.counts) == len(arrived)
    return list(routes.counts), arrived.long()


def _random(
    count: int, k: int, lengths: list[int], drop: bool = False, low: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + count)
    return [torch.randint(low, count + drop, (n, k), generator=generator) for n in lengths]


CASES: dict[str, tuple[list[Tensor], int]] = {
    "random": (_random(8, 2, [7, 3, 5, 9]), 8),
    "one expert each": (_random(4, 2, [4, 4, 4, 4]), 4),
    "some go nowhere": (_random(8, 3, [6, 2, 1, 5], drop=True), 8),
    "ranks without tokens": (_random(8, 2, [0, 4, 0, 1]), 8),
    "no token at all": (_random(8, 2, [0, 0, 0, 0]), 8),
    "experts of one rank only": (_random(8, 2, [5, 5, 5, 5], low=6), 8),
    "all go nowhere": ([torch.full((3, 2), 8)] * 4, 8),
    "all experts": ([torch.arange(4).expand(3, 4).contiguous()] * 4, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks(pools: Pools, name: str) -> None:
    indices, count = CASES[name]
    local = count // 4
    for rank, (counts, arrived) in enumerate(pools(4).run(on_ranks, indices, count)):
        expected = [
            [sender, token, expert]
            for expert in range(rank * local, (rank + 1) * local)
            for sender, index in enumerate(indices)
            for token in range(len(index))
            for chosen in index[token].tolist()
            if chosen == expert
        ]
        assert arrived.tolist() == expected
        assert counts == [sum(row[2] == rank * local + i for row in expected) for i in range(local)]


def looked_at(k: int) -> dict[str, int]:
    """What one plan asks of the host, and sorts."""
    seen = {"looks": 0, "sorts": 0}

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func._schema.name
            seen["sorts"] += name in ("aten::sort", "aten::argsort", "aten::topk")
            # shapes that depend on values are looks as well
            unknown = (
                name == "aten::repeat_interleave" and (kwargs or {}).get("output_size") is None
            )
            seen["looks"] += unknown or name in (
                "aten::_local_scalar_dense",
                "aten::nonzero",
                "aten::unique_dim",
            )
            return func(*args, **(kwargs or {}))

    tolist = torch.Tensor.tolist

    def counted(x: Tensor) -> Any:
        seen["looks"] += 1
        return tolist(x)

    index = torch.randint(0, 8, (5, k), generator=torch.Generator().manual_seed(dist.get_rank()))
    torch.Tensor.tolist = counted  # type: ignore[method-assign,assignment]
    try:
        with Counting():
            routes, _ = plan_routes(index, 8, dist.group.WORLD)
            assert seen["sorts"] == 1
            back = routes.sum_by_token(
                routes.from_experts(routes.to_experts(torch.ones(len(routes.order), 3)))
            )
            assert back.shape == (5, 3)
    finally:
        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("k", [1, 2])
def test_one_sort_and_one_look_at_the_host(pools: Pools, k: int) -> None:
    assert pools(2).run(looked_at, k) == [{"looks": 1, "sorts": 1}] * 2
