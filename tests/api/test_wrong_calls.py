"""Every wrong call of a public name is refused in words, on every rank, and leaves the model as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale
from hfscale.testing import RankPool

from ..tiny_models import tiny
from ..wrong_calls import outcomes


@pytest.mark.daily("MAKING-layout3", "STEPS-layout1")
@pytest.mark.parametrize(
    ("calls", "layout"),
    [
        ("STEPS", {"tp_size": 2}),
        ("STEPS", {"pp_size": 2}),
        ("STEPS", {"dp_shard_size": 2}),
        ("MAKING", {"tp_size": 2}),
    ],
)
def test_wrong_calls(
    pools: Callable[[int], RankPool], calls: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "saved")
    ranks = pools(2).run(outcomes, calls, layout, str(tmp_path / "saved"), str(tmp_path))
    assert [
        {name: said for name, said in found.items() if said != "refused"} for found, _ in ranks
    ] == [{}, {}]
    assert all(before == after for _, (before, after) in ranks)


@pytest.mark.parametrize("builder", [hfscale.plan, hfscale.from_config])
def test_every_builder_looks_at_every_option(builder: Callable[..., Any]) -> None:
    with pytest.raises(
        hfscale.ConfigError, match=r"compile must be True, False or one of .*, got 'nonsense'"
    ):
        builder(tiny("llama"), compile="nonsense")


def test_other_modules_are_not_told_to_load_themselves() -> None:
    with pytest.raises(
        hfscale.ConfigError, match="and got Linear: train other modules with accelerate"
    ) as refused:
        hfscale.parallelize(torch.nn.Linear(2, 2))
    assert "from_pretrained" not in str(refused.value)
