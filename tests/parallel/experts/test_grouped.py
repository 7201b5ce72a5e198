"""Experts whose shares have rows that torch's grouped product refuses: 24 bytes, where it wants multiples of 16."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from tests.mixtures import qwen3_moe

Pools = Callable[[int], RankPool]
IDS = torch.arange(24).view(2, 12) % 61 + 3
BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}


def _step(path: str, kwargs: dict[str, Any]) -> tuple[float, float]:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(tp_size=2), **kwargs).train()
    loss = hfscale.train_step(model, BATCH)
    return float(loss), float(hfscale.clip_grad_norm_(model, 1.0))


@pytest.mark.parametrize("mixed", [False, True], ids=["bfloat16", "mixed"])
def test_cut_experts_in_bfloat16(pools: Pools, tmp_path: Path, mixed: bool) -> None:
    AutoModelForCausalLM.from_config(
        qwen3_moe(moe_intermediate_size=24), dtype=torch.float32
    ).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    loss = stock(**BATCH).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 1.0)
    kwargs = (
        {"mixed_precision": "bf16", "dtype": torch.float32} if mixed else {"dtype": torch.bfloat16}
    )
    for found in pools(2).run(_step, str(tmp_path), kwargs):
        assert found == pytest.approx((float(loss.detach()), float(norm)), rel=2e-2)
