"""An adapter that one rank alone cannot add is added on no rank, no rank waits, and the model goes on as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch

import hfscale
from hfscale import HFScaleError, ParallelConfig
from hfscale.features.adapters import attach
from hfscale.testing import RankPool

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
IDS = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))
WORDS = {
    "target": "which matches nothing in the model",
    "directory": "does not exist",
    "layers": "out of luck",
    "values": "out of luck",
}


def _lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", **options
    )


def _broken(*_: Any, **__: Any) -> Any:
    raise ValueError("out of luck")


def _failed(layout: dict[str, Any], why: str, missing: str) -> tuple[str, str, float, float]:
    """The words of a first adapter and of a second one that fail on the last rank, and the losses around the first."""
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout), seed=0)
    rank = torch.distributed.get_rank()
    rows = IDS.chunk(hfscale.batch_world(model))[hfscale.batch_rank(model)]
    batch = {"input_ids": rows, "labels": rows}
    before = float(hfscale.eval_step(model, batch))
    config: Any = _lora(init_lora_weights="pissa" if why == "values" else True)
    replaced = {"layers": "_around_local", "values": "inject_alone"}.get(why)
    if rank == 1 and why == "target":
        config.target_modules = ["q_proj", "nothing"]
    elif rank == 1 and why == "directory":
        config = missing
    place = replaced if rank == 1 and replaced else "quietly"
    value = _broken if rank == 1 and replaced else attach.quietly
    with patch.object(attach, place, value), pytest.raises(HFScaleError) as first:
        hfscale.get_peft_model(model, config)
    after = float(hfscale.eval_step(model, batch))
    adapted = hfscale.get_peft_model(model, _lora(init_lora_weights=False))
    config = missing if rank == 1 and why == "directory" else config
    config = _lora() if why == "values" else config
    with patch.object(attach, place, value), pytest.raises(HFScaleError) as second:
        adapted.add_adapter("b", config)
    assert list(adapted.peft_config) == ["default"]
    hfscale.train_step(adapted, batch)
    return str(first.value), str(second.value), before, after


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ({"tp_size": 2}, "target"),
        ({"pp_size": 2}, "directory"),
        ({"dp_shard_size": 2}, "layers"),
        ({"tp_size": 2}, "values"),
    ],
    ids=lambda each: each if isinstance(each, str) else next(iter(each)),
)
def test_no_rank_adds_it(pools: Pools, tmp_path: Path, layout: dict[str, Any], why: str) -> None:
    for first, second, before, after in pools(2).run(_failed, layout, why, str(tmp_path / "none")):
        assert WORDS[why] in first
        assert WORDS[why] in second
        assert "the model is as it was" in first
        assert after == before
