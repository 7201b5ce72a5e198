"""Parameters outside of a spread model, in an optimizer of their own: refused where ranks would train other ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale._compat.replaced import attribute_replaced
from hfscale.testing import RankPool
from hfscale.train.guards import apart

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
IDS = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))


def _probe(
    layout: dict[str, int], way: str, kind: type[torch.optim.Optimizer] = torch.optim.SGD
) -> str:
    """Train a head on the logits of a frozen model for three steps; return what an error says, or its last weight."""
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout), seed=0)
    torch.manual_seed(1)
    head: Any = nn.Linear(model.config.vocab_size, 2)
    wrapped = DistributedDataParallel(head) if way == "ddp" else head
    optimizer = kind(head.parameters(), lr=0.1)
    world = hfscale.batch_world(model)
    rows = IDS[hfscale.batch_rank(model) :: world]
    for _ in range(3):
        with torch.no_grad():
            features = model(input_ids=rows).logits
        wrapped(features).square().mean().backward()
        if way == "summed":
            for parameter in head.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        try:
            optimizer.step()
        except ConfigError as error:
            return str(error)
        optimizer.zero_grad()
    return repr(head.weight.detach().double().sum().item())


@pytest.mark.parametrize("axis", ["dp_shard_size", "dp_replicate_size"])
def test_a_head_of_which_each_rank_has_another_gradient(pools: Pools, axis: str) -> None:
    for said in pools(2).run(_probe, {axis: 2}, "plain"):
        assert "others whose gradient is the same on every rank of" in said


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        ({"dp_shard_size": 2}, "ddp"),
        ({"dp_replicate_size": 2}, "summed"),
        ({"tp_size": 2}, "plain"),
    ],
)
def test_a_head_with_the_gradient_of_all_rows_trains(
    pools: Pools, layout: dict[str, int], way: str
) -> None:
    expected = float(_probe({}, "plain"))
    for said in pools(2).run(_probe, layout, way):
        assert float(said) == pytest.approx(expected, rel=1e-5)


def _of_one_rank() -> None:
    """One rank trains something of its own while a spread model lives: it waits a moment, once, and goes on."""
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(dp_shard_size=2), seed=0)
    own = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    with attribute_replaced(apart, "_PATIENCE", apart._PATIENCE / 100):
        for _ in range(3 if dist.get_rank() == 0 else 0):
            own(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    dist.barrier()
    hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})


def test_what_one_rank_trains_alone_is_its_own_business(pools: Pools) -> None:
    pools(2).run(_of_one_rank)


def _of_other_starts() -> None:
    """Ranks that train other models, with other first values, do not hold replicas."""
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(dp_shard_size=2), seed=0)
    torch.manual_seed(dist.get_rank())
    own = nn.Linear(3, 6)
    own(torch.randn(2, 3)).square().sum().backward()
    torch.optim.SGD(own.parameters(), lr=0.1).step()
    hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})


def test_what_never_was_equal_is_no_replica(pools: Pools) -> None:
    pools(2).run(_of_other_starts)
