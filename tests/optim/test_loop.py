"""Optimizers in a loop: they resume bit by bit (trap T25), and Accelerate and schedulers take them for torch's own."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import get_scheduler

import hfscale
from hfscale import ParallelConfig
from hfscale.models.precision import keep_float64
from hfscale.optim import muon
from hfscale.testing import RankPool, Traffic, count_traffic
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from .cases import STEPS, build, make, reference, restore, run, set_gradients, state_bytes

Pools = Callable[[int], RankPool]
RESUMED: dict[str, dict[str, Any]] = {
    "adamw_torch_fused": {},
    "adagrad": {},
    "adamw_8bit": {},
    "ademamix_8bit": {},
    "lion_8bit": {},
    "adafactor": {"optim_args": "beta1=0.9,scale_parameter=true"},
    "muon": {},
}


def local_weights(model: Any) -> dict[str, Tensor]:
    return {name: local_tensor(p.detach()).clone() for name, p in model.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def resume(layout: dict[str, Any], kind: str, directory: str) -> None:
    models = [build(kind, torch.float32, ParallelConfig(**layout)) for _ in range(2)]
    begin = [p.detach().clone() for p in models[0].parameters()]
    for name, options in RESUMED.items():
        path = f"{directory}/{name}"
        for each in models:
            restore(each.parameters(), begin)
            each.zero_grad()
        model, other = models
        optimizer = make(model, name, **options)
        run(model, kind, optimizer, range(2))
        hfscale.save_state(model, path, optimizer=optimizer)
        middle = local_weights(model)
        state = copy.deepcopy(optimizer.state_dict())
        run(model, kind, optimizer, range(2, 4))
        end = local_weights(model)

        fresh = make(other, name, **options)
        run(other, kind, fresh, range(7, 8))
        hfscale.load_state(other, path, optimizer=fresh)
        assert same(local_weights(other), middle), name
        run(other, kind, fresh, range(2, 4))
        assert same(local_weights(other), end), name

        again = make(model, name, **options)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                local_tensor(parameter).copy_(middle[key])
        again.load_state_dict(state)
        run(model, kind, again, range(2, 4))
        assert same(local_weights(model), end), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param({"dp_shard_size": 2}, "fused", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "dp_shard_size": 2}, "ragged", marks=pytest.mark.slow),
        pytest.param({"pp_size": 2, "dp_replicate_size": 2}, "fused", marks=pytest.mark.slow),
        ({"ep_size": 2, "dp_shard_size": 4}, "experts"),
    ],
)
def test_resumed_bit_by_bit(
    pools: Pools, tmp_path: Path, layout: dict[str, Any], kind: str
) -> None:
    pools(ParallelConfig(**layout).total_size).run(resume, layout, kind, str(tmp_path))


def test_resumed_in_one_process(tmp_path: Path) -> None:
    resume({}, "fused", str(tmp_path))


def batches(step: int, world: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 129, (4, 9), generator=generator)
    return [{"input_ids": part, "labels": part} for part in ids.chunk(world)]


def loop(layout: dict[str, Any], name: str) -> list[float]:
    """As with any optimizer: prepared, scheduled, clipped."""
    accelerator = hfscale.Accelerator()
    model = build("fused", torch.float64, ParallelConfig(**layout)).eval()
    optimizer = make(model, name)
    batches_of_a_step = accelerator.num_processes
    scheduler = get_scheduler("linear", optimizer, batches_of_a_step, 6 * batches_of_a_step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    losses = []
    with keep_float64():
        for step in range(STEPS):
            batch = batches(step, hfscale.batch_world(model))[hfscale.batch_rank(model)]
            losses.append(hfscale.train_step(model, batch).item())
            hfscale.clip_grad_norm_(model, 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert state_bytes(optimizer.optimizer) > 0 or not any(
        group["params"] for group in optimizer.param_groups
    )
    return losses


@pytest.mark.daily("layout1")
@pytest.mark.parametrize(
    "layout", [{"tp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}, {"pp_size": 2, "tp_size": 2}]
)
def test_losses_of_one_process(pools: Pools, layout: dict[str, Any]) -> None:
    for name in ("adamw_torch_fused", "adafactor"):
        model = build("fused", torch.float64).eval()
        (optimizer,) = reference(name, model)
        scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=6)
        wanted = []
        with keep_float64():
            for step in range(STEPS):
                wanted.append(hfscale.train_step(model, batches(step, 1)).item())
                hfscale.clip_grad_norm_(model, 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        for found in pools(ParallelConfig(**layout).total_size).run(loop, layout, name):
            assert found == pytest.approx(wanted, rel=1e-11)


def nothing_trains_on_the_last_stage(name: str) -> bool:
    model = build("ragged", torch.float32, ParallelConfig(pp_size=2))
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in key)
    before = local_weights(model)
    optimizer = make(model, name)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    hfscale.train_step(model, batches(0, 1)[0])
    optimizer.step()
    scheduler.step()
    moved = not same(before, local_weights(model))
    assert (
        moved
        == bool(state_bytes(optimizer))
        == any(group["params"] for group in optimizer.param_groups)
    )
    return moved


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_8bit", "adafactor", "muon"])
def test_a_stage_where_nothing_trains(pools: Pools, name: str) -> None:
    assert pools(2).run(nothing_trains_on_the_last_stage, name) == [True, False]


def says(layout: dict[str, Any], kind: str, limit: int) -> list[str]:
    # Torch may warn of a group that it makes.
    model = build(kind, torch.float32, ParallelConfig(**layout))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(model, "adamw_8bit", min_8bit_size=limit)
        assert isinstance(optimizer, torch.optim.Optimizer)
    return [str(warning.message) for warning in caught]


def test_says_what_is_stepped_whole(pools: Pools) -> None:
    first, second = pools(2).run(says, {"tp_size": 2}, "ragged", 4096)
    assert second == []
    assert len(first) == 1
    for part in (
        "model.embed_tokens.weight",
        "are not whole blocks of 256",
        "gathers weights",
        "is on every rank",
    ):
        assert part in first[0]
    assert pools(2).run(says, {"tp_size": 2}, "rows", 4096) == [[], []]


def traffic(name: str, kind: str) -> tuple[Traffic, int, int]:
    """Of one step; how many matrices are cut, and the entries of all rows and columns."""
    model = build(kind, torch.float32, ParallelConfig(tp_size=2))
    optimizer = make(model, name, **({"min_8bit_size": 4096} if "8bit" in name else {}))
    run(model, kind, optimizer, range(1))
    set_gradients(model, kind, 1)
    with count_traffic() as counted:
        optimizer.step()
    plans = [
        planned
        for planned, parameter in runtime_of(model).parameters()
        if parameter.grad is not None
    ]
    cut = sum(
        bool(planned.cuts) and len(planned.shape) == 2 and "layers" in planned.name
        for planned in plans
    )
    return counted, cut, sum(sum(planned.shape) + 3 for planned in plans)


def test_what_is_sent(pools: Pools) -> None:
    """Nothing by what is local, vectors in three collectives by Adafactor, all matrices to and fro by Muon."""
    for name in ("adamw_torch", "adamw_8bit"):
        assert not any(counted.calls for counted, *_ in pools(2).run(traffic, name, "rows"))
    for counted, _, entries in pools(2).run(traffic, "adafactor", "rows"):
        assert dict(counted.calls) == {"allreduce": 3}
        assert counted.payload["allreduce"] <= 4 * entries
    for counted, cut, _ in pools(2).run(traffic, "muon", "rows"):
        assert cut > 0
        assert dict(counted.calls) == {"alltoall": 2}


def work(layout: dict[str, Any], kind: str, only: str = "") -> tuple[int, int, int]:
    """Operations of Muon's products in one step, bytes in all-to-alls, and bytes of this rank's shards in 16 bits."""
    model = build(kind, torch.float32, ParallelConfig(**layout))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(only in name and parameter.requires_grad)
    optimizer = make(model, f"muon_whole {kind}")
    set_gradients(model, kind, 0)
    with count_traffic() as counted, FlopCounterMode(display=False) as counter:
        optimizer.step()
    held = [
        p
        for each in optimizer.param_groups
        if "ns_steps" in each
        for p in each["params"]
        if p.grad is not None
    ]
    return (
        counter.get_total_flops(),
        counted.payload["alltoall"],
        2 * sum(local_tensor(p).numel() for p in held),
    )


@pytest.mark.daily("biased_experts-layout2-1.3", "rows-layout3-1.1")
@pytest.mark.parametrize(
    ("kind", "layout", "most"),
    [
        ("rows", {"tp_size": 2}, 1.1),
        ("rows", {"tp_size": 2, "dp_shard_size": 2}, 1.3),
        ("biased_experts", {"dp_shard_size": 4}, 1.3),
        ("rows", {"dp_replicate_size": 2}, 1.1),
        pytest.param("rows", {"tp_size": 2, "dp_replicate_size": 2}, 1.3, marks=pytest.mark.slow),
        pytest.param(
            "biased_experts",
            {"ep_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2},
            1.3,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_matrix_is_orthogonalized_on_one_rank(
    pools: Pools, kind: str, layout: dict[str, Any], most: float
) -> None:
    """So a rank does one of n shares of the products, and sends about what it holds, in 16 bits, there and back."""
    ranks = ParallelConfig(**layout).total_size
    found, (alone, *_) = pools(ranks).run(work, layout, kind), work({}, kind)
    assert sum(each for each, *_ in found) == alone
    for operations, sent, held in found:
        assert operations <= most * alone / ranks
        assert 0 < sent <= most * 2 * held * len(layout)  # there and back over each axis


def dealt(layout: dict[str, Any], kind: str) -> list[int]:
    """How often matrices were dealt to ranks by the end of each step, of which the third has fewer gradients."""
    model = build(kind, torch.float32, ParallelConfig(**layout))
    found = list[int]()
    optimizer = make(model, "muon")
    with mock.patch.object(muon, "share_by_cost", wraps=muon.share_by_cost) as share:
        for step in range(4):
            set_gradients(model, kind, step)
            if step > 1:
                model.model.layers[0].mlp.up_proj.weight.grad = None
            optimizer.step()
            found.append(share.call_count)
    return found


def test_matrices_are_dealt_anew_where_others_have_gradients(pools: Pools) -> None:
    assert pools(2).run(dealt, {"tp_size": 2}, "rows") == [[1, 1, 2, 2]] * 2


def test_more_ranks_than_matrices(pools: Pools) -> None:
    found = pools(2).run(work, {"tp_size": 2}, "rows", "layers.1.mlp.up_proj")
    assert sorted(operations > 0 for operations, *_ in found) == [False, True]


def moments(layout: dict[str, Any]) -> bool:
    """Plain tensors of the shapes of shares, in 8 bits by the size of the whole."""
    model = build("rows", torch.float32, ParallelConfig(**layout))
    optimizer = hfscale.create_optimizer(model, "adamw_8bit", lr=1e-3, min_8bit_size=2048)
    run(model, "rows", optimizer, range(1))
    for planned, parameter in runtime_of(model).parameters():
        state = optimizer.state[parameter]
        assert type(state["state1"]) is Tensor
        assert state["state1"].shape == local_tensor(parameter).shape
        whole = torch.Size(planned.shape).numel()
        assert (state["state1"].dtype == torch.uint8) == (whole >= 2048), planned.name
    return True


def test_precision_by_the_size_of_the_whole(pools: Pools) -> None:
    """Of [64, 32] entries, a rank has fewer than the limit."""
    assert all(pools(2).run(moments, {"tp_size": 2}))
