"""A pipeline schedule and a compression of gradients from a file outside of the package train as those inside do."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, ParallelConfig, extensions
from hfscale.extensions import register
from hfscale.testing import RankPool
from hfscale.testing.parity import ragged_batch

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]

ADDED = '''
"""Run one microbatch after the other; send gradients as they are, and count the buffers."""

import torch
import torch.distributed as dist

from hfscale.config.schedules import Schedule
from hfscale.errors import ConfigError
from hfscale.extensions import Extension
from hfscale.parallel.data.gradient_compression import Compressor
from hfscale.parallel.pipeline.timeline import Action


def one_by_one(pp_size, num_microbatches, steps):
    kinds = ("forward", "backward")
    return tuple(
        tuple(Action(rank, kind, index) for index in range(num_microbatches) for kind in kinds)
        for rank in range(pp_size)
    )


def check(plan, options):
    if options.mixed_precision == "fp8":
        raise ConfigError("one_by_one takes no fp8: use bf16")


class Counted(Compressor):
    default_rank = 3

    def __init__(self, group, sizes, rank, seed, unit):
        self.group = group
        self.buffers = torch.zeros((), dtype=torch.int64)

    def __call__(self, flat):
        self.buffers += 1
        dist.all_reduce(flat, group=self.group)
        flat.div_(dist.get_world_size(self.group))

    def state(self):
        return {"buffers": self.buffers}

    def put_state(self, state, device):
        self.buffers = state["buffers"].to(device)

    @staticmethod
    def entries_kept(shape, rank):
        return rank


SCHEDULE = Schedule(order=one_by_one, check=check)
EXTENSION = Extension(
    name="choices",
    schedules={"one_by_one": "added_choices:SCHEDULE"},
    gradient_compressions={"counted": "added_choices:Counted"},
)
'''


def add_choices(folder: str) -> None:
    sys.path.insert(0, folder)
    from added_choices import EXTENSION  # type: ignore[import-not-found]

    register(EXTENSION)


def remove_choices(folder: str) -> None:
    sys.path.remove(folder)
    sys.modules.pop("added_choices")
    del extensions._registered["choices"]
    extensions._found.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "added_choices.py").write_text(ADDED)
    return str(tmp_path)


def trained(layout: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and the weights behind them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64)
    model = hfscale.parallelize(model, ParallelConfig(**layout))
    optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=0.01)
    losses = []
    drawn = torch.Generator().manual_seed(1)
    for _ in range(3):
        batches = [ragged_batch(drawn, 67, 2, 7 + number, number % 2 == 0) for number in range(4)]
        losses.append(float(hfscale.train_step(model, batches)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(hfscale.stream_weights(model))


@pytest.mark.parametrize(
    ("axis", "choice"),
    [
        ("pp_size", "pipeline_schedule=one_by_one"),
        ("dp_replicate_size", "gradient_compression=counted"),
    ],
)
def test_choices_from_a_file_train_as_the_own_ones(
    pools: Pools, folder: str, axis: str, choice: str
) -> None:
    ranks = pools(2)
    wanted = ranks.run(trained, {axis: 2})[0]
    ranks.run(add_choices, folder)
    try:
        losses, weights = ranks.run(trained, {axis: 2} | dict([choice.split("=")]))[0]
    finally:
        ranks.run(remove_choices, folder)
    assert losses == pytest.approx(wanted[0], rel=1e-12)
    for name, weight in wanted[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-10, atol=1e-12, msg=name)


def test_plans_and_estimates_know_choices_from_a_file(folder: str) -> None:
    with pytest.raises(ConfigError, match="pipeline_schedule"):
        ParallelConfig(pp_size=2, pipeline_schedule="one_by_one")
    add_choices(folder)
    try:
        staged = ParallelConfig(pp_size=2, pipeline_schedule="ONE_BY_ONE")
        assert staged.pipeline_schedule == "one_by_one"
        assert staged.flushes
        with pytest.raises(ConfigError, match="one_by_one takes no fp8"):
            hfscale.plan(tiny("llama"), staged, mixed_precision="fp8")
        with pytest.raises(ConfigError, match="powersgd_rank=2 needs"):
            ParallelConfig(dp_replicate_size=2, gradient_compression="bf16", powersgd_rank=2)
        replicas = ParallelConfig(dp_replicate_size=2, gradient_compression="counted")
        assert replicas.powersgd_rank == 3
        plain = hfscale.memory_estimate(
            hfscale.plan(tiny("llama"), ParallelConfig(dp_replicate_size=2))
        )
        kept = hfscale.memory_estimate(hfscale.plan(tiny("llama"), replicas))
        parameters = len(dict(AutoModelForCausalLM.from_config(tiny("llama")).named_parameters()))
        assert kept.gradients - plain.gradients == 4 * 3 * parameters
    finally:
        remove_choices(folder)
