"""What stages tell each other: of tied tensors, and of whether they train."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hfscale
from hfscale import ParallelConfig
from hfscale.parallel.pipeline.agreement import _sum_of_bits
from hfscale.testing import RankPool

from ...refusals import refusal_of
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_copies_are_compared_exactly_whatever_order_sums_are_made_in(dtype: torch.dtype) -> None:
    """A GPU may add in another order on each stage, which changes sums of floating-point numbers."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 30, (37, 41), generator=generator)
    copy = (torch.randn(37, 41, generator=generator, dtype=torch.float64) * 2.0**exponents).to(
        dtype
    )
    assert torch.equal(_sum_of_bits(copy), _sum_of_bits(copy.flip(0, 1).T))
    other = copy.clone()
    other[3, 5] *= 1 + torch.finfo(dtype).eps
    assert not torch.equal(_sum_of_bits(copy), _sum_of_bits(other))


def _frozen(layout: dict[str, Any]) -> tuple[str, float, float]:
    """Train a frozen model; then evaluate it, and train the last stage alone."""
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=4), parallel=ParallelConfig(**layout), seed=1
    )
    model.requires_grad_(False)
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    refused = refusal_of(lambda: hfscale.train_step(model, batch))
    before = float(hfscale.eval_step(model, batch))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    return refused, before, float(hfscale.train_step(model, batch))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_step_in_which_no_stage_trains_is_refused(pools: Pools, schedule: str) -> None:
    layout = {"pp_size": 2, "pipeline_schedule": schedule}
    for refused, before, after in pools(2).run(_frozen, layout):
        assert "train_step must have a parameter that trains" in refused
        assert before == pytest.approx(after, rel=1e-6)
