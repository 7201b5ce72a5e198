"""A rank without rows takes part in the step and adds nothing to it (the last, short batch of an epoch)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
ROUTING = hfscale.RoutingConfig(balance_loss=0.1, z_loss=0.01)
MIXTRAL = MixtralConfig(
    hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=67, num_local_experts=4, num_experts_per_tok=2,
)  # fmt: skip


def batch(rows: int, masked: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(1))[:rows]
    return {
        "input_ids": ids,
        "labels": ids,
        **({"attention_mask": torch.ones_like(ids)} if masked else {}),
    }


def step(
    path: str, layout: dict[str, Any], routing: Any, accumulate: bool
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Rank 0's rows alone: loss, norm, and the worst difference of a gradient from what one process stored."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64, routing=routing
    )
    empty = hfscale.batch_rank(model) > 0
    given: Any = batch(0 if empty else 4, masked=empty)
    given = [given, batch(0)] if accumulate else given
    model.train()
    loss = hfscale.train_step(model, given)
    assert hfscale.eval_step(model, given).isfinite()
    gradients = {
        p.name: local_tensor(parameter.grad) for p, parameter in runtime_of(model).parameters()
    }
    reference = Path(path) / "gradients.pt"
    if layout == {}:
        torch.save(gradients, reference)
    expected = torch.load(reference)
    ranks = runtime_of(model).mesh.ranks
    plans = {planned.name: planned for planned, _ in runtime_of(model).parameters()}
    apart = {
        name: float((found - plans[name].take(expected[name], ranks)).abs().max()) for name, found in gradients.items()
        if found.numel()
    }  # fmt: skip
    return loss, hfscale.clip_grad_norm_(model, 1.0), apart


LAYOUTS: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "sharded data": ({"dp_shard_size": 2}, None, False),
    "replicas, accumulating": ({"dp_replicate_size": 2}, None, True),
    "stages": ({"pp_size": 2, "dp_shard_size": 2}, None, False),
    "tensor ranks": ({"tp_size": 2, "dp_shard_size": 2, "sequence_parallel": True}, None, False),
    "experts over data ranks": ({"ep_size": 2, "dp_shard_size": 2}, ROUTING, False),
}


@pytest.mark.daily("stages", "sharded data", "experts over data ranks")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_its_share_is_zero(
    pools: Pools, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, routing, accumulate = LAYOUTS[kind]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = MIXTRAL if routing else tiny("llama")
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(tmp_path)
    loss, norm, _ = step(str(tmp_path), {}, routing, False)
    found = pools(ParallelConfig(**layout).total_size).run(
        step, str(tmp_path), layout, routing, accumulate
    )
    for own_loss, own_norm, apart in found:
        # transformers' norms and softmax compute in float32
        torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(own_norm, norm, rtol=1e-5, atol=0.0)
        assert max(apart.values()) < 1e-5


def _uneven(layout: dict[str, Any], counts: dict[int, int]) -> str:
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=4), parallel=ParallelConfig(**layout)
    )
    count = counts[hfscale.batch_rank(model)]
    ids = torch.arange(count * 7).view(count, 7) % 60
    one_by_one = [{"input_ids": row[None], "labels": row[None]} for row in ids]
    try:
        hfscale.train_step(
            model, {"input_ids": ids, "labels": ids} if "pp_size" in layout else one_by_one
        )
    except hfscale.ConfigError as error:
        return str(error)
    return ""


STAGES = {"pp_size": 2, "dp_shard_size": 2, "pipeline_schedule": "gpipe"}


@pytest.mark.parametrize(
    ("layout", "refused"),
    [
        ({"dp_shard_size": 2}, True),
        ({**STAGES, "weights_regather": True}, True),
        ({**STAGES, "weights_regather": True, "num_microbatches": 2}, False),
        (STAGES, False),  # weights are gathered once a step
    ],
)
def test_data_ranks_with_other_numbers_of_microbatches(
    pools: Pools, layout: dict[str, Any], refused: bool
) -> None:
    """They would wait for each other forever."""
    found = pools(ParallelConfig(**layout).total_size).run(_uneven, layout, {0: 4, 1: 6})
    assert all(("has more or fewer" in error) == refused for error in found), found
