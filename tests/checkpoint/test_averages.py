"""Averages of weights beside a model are shards: they go on where they were written, and in no other layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.testing import RankPool

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]


class Average:
    """As scripts write it; the seconds of each rank are its own."""

    def __init__(self, model: Any, seconds: float) -> None:
        self.state: dict[str, Any] = {name: p.detach() / 2 for name, p in model.named_parameters()}
        self.seconds = seconds

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


class Clock(Average):
    def state_dict(self) -> dict[str, Any]:
        return {"state": self.seconds}


def _saved(layout: dict[str, int], again: dict[str, int], directory: str) -> str:
    rank = torch.distributed.get_rank()
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout))
    average = Average(model, 0.0)
    hfscale.save_state(model, directory, average=average, clock=Clock(model, 1.0 + rank))
    average.state = {}
    hfscale.load_state(model, directory, average=average)
    for name, parameter in model.named_parameters():
        assert torch.equal(average.state[name], parameter / 2)
    other = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**again))
    hfscale.load_state(other, directory, clock=Clock(other, 0.0))
    with pytest.raises(CheckpointError) as caught:
        hfscale.load_state(other, directory, average=Average(other, 0.0))
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "again"), [({"tp_size": 2}, {"pp_size": 2}), ({"pp_size": 2}, {"tp_size": 2})]
)
def test_another_layout(
    pools: Pools, tmp_path: Path, layout: dict[str, int], again: dict[str, int]
) -> None:
    """Each rank took the shards of the saved rank that had its batch, the first."""
    for said in pools(2).run(_saved, layout, again, str(tmp_path / "state")):
        assert "'average' on each rank, with numbers of that rank's shards" in said
        assert "optimizer.state[parameter]['ema']" in said
