"""Given routes, layouts equal one process with the same routes; recorded routes are the same in every layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import hfscale
from hfscale import MemoryConfig, ParallelConfig, RoutingConfig
from hfscale._compat.transformers.experts import use_eager_experts
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool
from hfscale.testing.parity import Batch, Case, assert_layout_equal
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..mixtures import EAGER, gpt_oss, qwen2_moe, qwen3_moe
from ..sweeps import cases

Pools = Callable[[int], RankPool]
LAYERS = 2
EXPERTS = 4
CHOSEN = 2


def drawn(ids: Tensor) -> Tensor:
    """Routes for every token; the router's own choice (-1) for every fifth."""
    generator = torch.Generator().manual_seed(int(ids.sum()))
    routes = torch.rand(*ids.shape, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :CHOSEN]
    return routes.masked_fill((torch.arange(ids.shape[1]) % 5 == 3)[:, None, None], -1)


class Replayed(Case):
    """The reference answers ``torch.topk`` layer by layer, in the order in which a stock model's routers call it."""

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        forward = model.forward

        def answered(**batch: Tensor) -> Any:
            with _answering(drawn(batch["input_ids"])):
                return forward(**batch)

        model.forward = answered
        try:
            return super().reference_step(model, step)
        finally:
            del model.forward

    def layout_step(self, model: Any, microbatches: list[Batch]) -> Tensor:
        return hfscale.train_step(
            model, microbatches, routes=[drawn(batch["input_ids"]) for batch in microbatches]
        )


@contextmanager
def _answering(routes: Tensor) -> Iterator[None]:
    stock, layers = torch.topk, iter(range(LAYERS))

    def topk(scores: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
        wanted = routes[:, :, next(layers)].flatten(0, 1)
        index = torch.where(wanted < 0, stock(scores, k, dim)[1], wanted)
        return scores.take_along_dim(index, dim), index

    torch.topk = topk  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk = stock


RECOMPUTED = {"memory": MemoryConfig(recompute="full")}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2": ({"tp_size": 2}, {}),
    "tp2, sequence": ({"tp_size": 2, "sequence_parallel": True}, {}),
    "ep2": ({"ep_size": 2}, {}),
    "ep2, recomputed": ({"ep_size": 2}, RECOMPUTED),
    "shard2": ({"dp_shard_size": 2}, RECOMPUTED),
    "pp2": ({"pp_size": 2}, {"accumulation": 4}),
    "pp2, recomputed": ({"pp_size": 2}, {"accumulation": 4, **RECOMPUTED}),
    "cp2": ({"cp_size": 2}, {}),
    "cp2, recomputed": ({"cp_size": 2}, RECOMPUTED),
    "ep2, tp2": ({"ep_size": 2, "tp_size": 2}, {}),
    "ep2, tp2, sequence": ({"ep_size": 2, "tp_size": 2, "sequence_parallel": True}, {}),
    "ep2, tp2, sequence, recomputed": ({"ep_size": 2, "tp_size": 2, "sequence_parallel": True}, RECOMPUTED),
    "ep2, tp2, blocks recomputed": (
        {"ep_size": 2, "tp_size": 2, "sequence_parallel": True}, {"memory": MemoryConfig(recompute=["mlp"])}
    ),
    "ep2, tp2 over data": ({"ep_size": 2, "expert_tp_size": 2, "tp_size": 2, "dp_shard_size": 2}, {}),
    "ep2, pp2": ({"ep_size": 2, "pp_size": 2}, {"accumulation": 4}),
    "cp2, tp2, sequence": ({"cp_size": 2, "tp_size": 2, "ep_size": 2, "sequence_parallel": True}, {}),
}  # fmt: skip
DAILY = ("pp2, recomputed", "cp2, recomputed", "ep2", "ep2, tp2, sequence, recomputed")


@pytest.mark.daily("qwen3_moe-ep2, tp2, sequence, recomputed", "qwen3_moe-pp2, recomputed")
@pytest.mark.parametrize(
    ("make", "name"),
    cases(
        [
            *product((qwen2_moe, qwen3_moe), CASES),
            (gpt_oss, DAILY[-1]),
        ],  # another family where tokens are cut
        daily=[*product((qwen3_moe,), DAILY), (gpt_oss, DAILY[-1])],
    ),
)
def test_replayed_routes_equal_one_process(
    pools: Pools, make: Callable[..., Any], name: str
) -> None:
    layout, changes = CASES[name]
    parallel = ParallelConfig(**layout)
    assert_layout_equal(
        Replayed(make(), hf_kwargs=EAGER, **changes), parallel, pools(parallel.total_size)
    )


def rows_of(rank: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    ids = [torch.randint(0, 67, (2, tokens), generator=generator) for tokens in (11, 8)]
    return [{"input_ids": each, "labels": each} for each in ids]


def steps(layout: dict[str, Any], batches: list[Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Losses, gradients and routes of a plain step, a recorded one, and one that replays what was recorded."""
    parallel = ParallelConfig(**layout)
    ranks = ParallelConfig(**layout).batch_world
    model = hfscale.from_config(
        qwen3_moe(), parallel=parallel, dtype=torch.float64, **asked
    ).train()
    use_eager_experts(model)
    share = len(batches) // ranks
    own = batches[hfscale.batch_rank(model) * share :][:share]
    own = own[0] if share == 1 else own
    found: list[tuple[Tensor, list[Tensor]]] = []

    def step(**options: Any) -> None:
        model.zero_grad()
        torch.manual_seed(0)
        loss = hfscale.train_step(model, own, **options)
        gradients = [
            local_tensor(p.grad).clone()
            for _, p in runtime_of(model).parameters()
            if p.grad is not None
        ]
        found.append((loss, gradients))

    with keep_float64():
        step()
        with hfscale.record_routes(model) as routes:
            step()
        step(routes=routes)
    same = [
        torch.equal(loss, found[0][0]) and all(map(torch.equal, gradients, found[0][1]))
        for loss, gradients in found
    ]
    return {"same": same, "routes": routes, "loss": found[0][0], "rank": hfscale.batch_rank(model)}


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2": ({"tp_size": 2}, {}),
    "ep2": ({"ep_size": 2}, RECOMPUTED),
    "ep2, tp2, sequence": ({"ep_size": 2, "tp_size": 2, "sequence_parallel": True}, RECOMPUTED),
    "cp2": ({"cp_size": 2}, {}),
    "cp2, tp2, sequence": ({"cp_size": 2, "tp_size": 2, "ep_size": 2, "sequence_parallel": True}, {}),
    "pp2": ({"pp_size": 2}, RECOMPUTED),
    "pp2, ep2": ({"pp_size": 2, "ep_size": 2}, {}),
    "capacity": ({"ep_size": 2, "tp_size": 2}, {"routing": RoutingConfig(capacity_factor=1.0, balance_loss=0.1)}),
    "capacity, sequence": (
        {"ep_size": 2, "tp_size": 2, "sequence_parallel": True}, {"routing": RoutingConfig(capacity_factor=1.0)}
    ),
}  # fmt: skip


@pytest.mark.daily("one batch-cp2")
@pytest.mark.parametrize(
    "name", cases(LAYOUTS, daily=("cp2", "pp2", "ep2, tp2, sequence", "capacity"))
)
@pytest.mark.parametrize("together", [True, False], ids=["one batch", "two batches"])
def test_recorded_routes_are_those_of_one_process_and_replay_bit_by_bit(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, name: str, together: bool
) -> None:
    layout, asked = LAYOUTS[name]
    parallel = ParallelConfig(**layout)
    batches = [
        each
        for rank in range(parallel.batch_world)
        for each in rows_of(rank)[: 1 if together else 2]
    ]
    if together and parallel.pp > 1:  # one batch, of four rows, that is cut into microbatches
        batches = [
            {name: value.repeat(2, 1).roll(1, 1) for name, value in each.items()}
            for each in batches
        ]
    with monkeypatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        one = steps({}, batches, {name: asked[name] for name in asked if name == "routing"})
    assert one["same"] == [True] * 3
    each = len(batches) // parallel.batch_world
    for found in pools(parallel.total_size).run(steps, layout, batches, asked):
        assert found["same"] == [True] * 3
        expected = one["routes"][found["rank"] * each :][:each]
        assert len(found["routes"]) == each
        assert all(map(torch.equal, found["routes"], expected))
        torch.testing.assert_close(found["loss"], one["loss"], rtol=1e-12, atol=0)
