"""Averaged weights (EMA) are put into a model by copies; an assignment of ``data``, which does nothing, is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]


def _swapped(layout: dict[str, int]) -> tuple[str, list[float]]:
    model = hfscale.from_config(
        tiny("llama"), parallel=ParallelConfig(**layout), dtype=torch.float64
    )
    ids = torch.arange(24).reshape(2, 12)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    first = {id(p): p.detach().clone() for p in model.parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        losses.append(float(hfscale.train_step(model, batch)))
        optimizer.step()
        optimizer.zero_grad()
    said = ""
    for p in model.parameters():
        p.data = p.data  # as stock code does, if types are right already
        try:
            p.data = first[id(p)]
        except ConfigError as error:
            said = str(error)
            with torch.no_grad():
                p.copy_(first[id(p)])
    losses.append(float(hfscale.eval_step(model, batch)))
    return said, losses


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard_size": 2},
        {"dp_replicate_size": 2},
        {"cp_size": 2},
        {"tp_size": 2},
        {"pp_size": 2},
    ],
)
def test_weights_of_before(pools: Pools, layout: dict[str, int]) -> None:
    """Over FSDP2 the assignment left the trained weights where they were."""
    for said, losses in pools(2).run(_swapped, layout):
        assert losses[2] == pytest.approx(losses[0], rel=1e-10)
        assert losses[1] < losses[0]
        if "tp_size" in layout or "pp_size" in layout:
            assert said == ""
        else:
            assert "parameter.data = value does nothing to" in said
            assert "parameter.copy_(value)" in said
