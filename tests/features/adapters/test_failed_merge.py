"""A merge that fails on one rank fails on all, and leaves the model as it was."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch

import hfscale
from hfscale import HFScaleError, ParallelConfig
from hfscale.features.adapters.merge_adapters import WholeMerge
from hfscale.testing import RankPool
from hfscale.train.runtime import local_tensor, runtime_of

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
IDS = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))


def broken(*_: Any) -> Any:
    raise ValueError("out of luck")


def failed(layout: dict[str, Any], why: str) -> tuple[str, float, float, float]:
    """The words of a failed merge, and the losses before and after it, and once the earlier optimizer has stepped."""
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    parallel = ParallelConfig(**layout)
    model = hfscale.from_config(
        tiny("llama"), parallel=parallel, dtype=torch.float64, seed=0, peft_config=lora
    )
    runtime = runtime_of(model)
    rows = IDS.chunk(hfscale.batch_world(model))[hfscale.batch_rank(model)]
    batch = {"input_ids": rows, "labels": rows}
    before = float(hfscale.train_step(model, batch))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    optimizer.zero_grad()
    first = not any(runtime.mesh.ranks.values())
    factor = next(
        p for planned, p in runtime.parameters() if planned.name.endswith("lora_B.default.weight")
    )
    entry = local_tensor(factor.detach())[0, 0].clone()
    if why == "nan" and first:
        local_tensor(factor.detach())[0, 0] = float("nan")
    merged = broken if why == "rank" and first else WholeMerge.merged
    with patch.object(WholeMerge, "merged", merged), pytest.raises(HFScaleError) as error:
        hfscale.merge_and_unload(model, quiet=True)
    if why == "nan" and first:
        local_tensor(factor.detach())[0, 0] = entry
    after = float(hfscale.train_step(model, batch))
    optimizer.step()
    return str(error.value), before, after, float(hfscale.eval_step(model, batch))


WORDS = {"nan": "holds NaN or infinity on rank 0", "rank": "out of luck"}


@pytest.mark.parametrize(
    ("layout", "why"), [("tp_size", "nan"), ("tp_size", "rank"), ("dp_shard_size", "rank")]
)
def test_the_model_goes_on(pools: Pools, layout: str, why: str) -> None:
    for words, before, after, trained in pools(2).run(failed, {layout: 2}, why):
        assert WORDS[why] in words
        assert "the model is as it was" in words
        assert after == before
        assert trained < after - 1e-4


def conversion(layout: dict[str, Any]) -> str:
    config = peft.LoHaConfig(
        r=4, target_modules=["q_proj"], init_weights=False, task_type="CAUSAL_LM"
    )
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout), seed=0)
    with pytest.raises(HFScaleError) as error:
        peft.convert_to_lora(hfscale.get_peft_model(model, config, seed=0), rank=2)
    return str(error.value)


def test_conversion_of_one_ranks_factors_is_refused(pools: Pools) -> None:
    for words in pools(2).run(conversion, {"tp_size": 2}):
        assert "conversion to LoRA does not work on a sharded model" in words
