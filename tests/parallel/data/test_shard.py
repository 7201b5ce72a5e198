"""What the data axes gather and reduce at a time, over which ranks, and when."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

import hfscale
from hfscale import ParallelConfig
from hfscale.parallel.data.shard import one_reduction, set_gradient_sync
from hfscale.testing import RankPool, count_traffic
from hfscale.train.runtime import local_tensor, runtime_of

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
IDS = (torch.arange(2 * 8) % 60).view(2, 8)


def _load(layout: dict[str, int], **changes: Any) -> Any:
    model = hfscale.from_config(tiny("llama", **changes), parallel=ParallelConfig(**layout), seed=0)
    return model.train()


def _wrapped(layout: dict[str, int]) -> tuple[list[str], set[tuple[str, ...]], list[Any]]:
    """Names of wrapped modules, mesh dims of the parameters, and their placements."""
    model = _load(layout)
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    data = [parameter.data for parameter in model.parameters()]
    sharded = [tensor for tensor in data if isinstance(tensor, DTensor)]
    dims = {tuple(tensor.device_mesh.mesh_dim_names or ()) for tensor in sharded}
    return names, dims, [tensor.placements for tensor in sharded]


@pytest.mark.parametrize(
    ("layout", "dims"),
    [
        ({"dp_shard_size": 2}, ("dp_shard",)),
        ({"dp_replicate_size": 2}, ("dp_replicate", "dp_shard")),
        ({"tp_size": 2}, None),
    ],
)
def test_layers_are_wrapped_each_and_then_the_rest(
    pools: Pools, layout: dict[str, int], dims: tuple[str, ...] | None
) -> None:
    for names, found, placements in pools(2).run(_wrapped, layout):
        if dims is None:  # ranks with one batch have nothing to reduce
            assert not names
            assert not found
            continue
        assert names == ["", "model.layers.0", "model.layers.1"]
        assert found == {dims}
        outer = () if len(dims) == 1 else (Replicate(),)
        assert all(placement == (*outer, Shard(0)) for placement in placements)


def _reductions() -> dict[str, int]:
    """Reduce-scatters of two passes, reduced each, accumulated, and within one reduction."""
    model = _load({"dp_shard_size": 2})

    def passes(*sync: bool) -> None:
        for last in sync:
            set_gradient_sync(model, last)
            model(input_ids=IDS).logits.sum().backward()
        model.zero_grad()

    found = {}
    for name, sync in {"each": (True, True), "accumulated": (False, True)}.items():
        with count_traffic() as traffic:
            passes(*sync)
        found[name] = traffic.calls["reduce_scatter"]
    with count_traffic() as traffic, one_reduction(model, backward=True, regather=False):
        losses = [model(input_ids=IDS).logits.sum() for _ in range(2)]  # both are under way
        for loss in losses:
            loss.backward()
    found |= {"one": traffic.calls["reduce_scatter"], "gathers of one": traffic.calls["allgather"]}
    return found


def test_gradients_are_reduced_once(pools: Pools) -> None:
    for found in pools(2).run(_reductions):
        groups = 3  # two layers and the rest
        assert found == {
            "each": 2 * groups,
            "accumulated": groups,
            "one": groups,
            "gathers of one": groups,
        }


def _gathered() -> tuple[int, int, int]:
    """Numbers of the first layer's weights: as shards, after a pass that keeps them, and after giving them up."""
    model = _load({"dp_replicate_size": 2})
    layer = runtime_of(model).plan.layers[0]

    def count() -> int:
        return sum(local_tensor(p.data).numel() for p in model.get_submodule(layer).parameters())

    before = count()
    model(input_ids=IDS)
    during = sum(isinstance(p.data, DTensor) for p in model.get_submodule(layer).parameters())
    runtime_of(model).data.release()
    return before, during, count()


def test_whole_weights_are_given_up(pools: Pools) -> None:
    for before, still_sharded, after in pools(2).run(_gathered):
        assert not still_sharded
        assert before == after


def _tied() -> tuple[bool, bool]:
    model = _load({"dp_shard_size": 2}, tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    return embedding is head, isinstance(embedding.data, DTensor)


def test_a_tie_stays_one_parameter(pools: Pools) -> None:
    assert pools(2).run(_tied) == [(True, True)] * 2


def _memory_of_weights(layout: dict[str, int], dtype: torch.dtype, mixed: str) -> list[bool]:
    """Whether each weight that a layer computes with lies in the shard's memory, in three steps."""
    model = hfscale.from_config(
        tiny("llama"), parallel=ParallelConfig(**layout), dtype=dtype, mixed_precision=mixed
    ).train()
    layer = model.model.layers[1]
    shards = {name: local_tensor(p).data_ptr() for name, p in layer.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[bool] = []

    def look(*_: Any) -> None:
        found.extend(p.data_ptr() == shards[name] for name, p in layer.named_parameters())

    layer.register_forward_hook(look)
    for _ in range(3):
        hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("layout", "dtype", "mixed", "in_place"),
    [
        ({"dp_replicate_size": 2}, torch.float64, "no", True),
        ({"dp_replicate_size": 2}, torch.float32, "bf16", False),
        ({"dp_shard_size": 2}, torch.float64, "no", False),
    ],
)
def test_replicas_compute_with_their_weights_and_no_copies(
    pools: Pools, layout: dict[str, int], dtype: torch.dtype, mixed: str, in_place: bool
) -> None:
    for found in pools(2).run(_memory_of_weights, layout, dtype, mixed):
        assert len(found) == 3 * 9
        assert set(found) == {in_place}


def _loaded_again(layout: dict[str, int]) -> list[float]:
    """Losses before and after other weights, in other memory, are put in place."""
    model = _load(layout).double()
    losses = [float(hfscale.train_step(model, {"input_ids": IDS, "labels": IDS}))]
    changed = {name: value * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(changed, assign=True)
    return [*losses, float(hfscale.train_step(model, {"input_ids": IDS, "labels": IDS}))]


def test_replicas_compute_with_weights_that_are_loaded_later(pools: Pools) -> None:
    whole = _loaded_again({})
    assert whole[0] != whole[1]
    for found in pools(2).run(_loaded_again, {"dp_replicate_size": 2}):
        assert found == pytest.approx(whole, rel=1e-12)
