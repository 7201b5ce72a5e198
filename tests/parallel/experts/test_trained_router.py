"""A router that trains whole beside an adapter (``modules_to_save=["gate"]``), with losses on its logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import MixtralConfig

import hfscale
from hfscale import ParallelConfig, RoutingConfig
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

Pools = Callable[[int], RankPool]
CONFIG = MixtralConfig(
    hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=67, num_local_experts=4, num_experts_per_tok=2,
)  # fmt: skip
ROUTINGS = {
    "losses": RoutingConfig(balance_loss=0.5, z_loss=0.1),
    "switch": RoutingConfig(router="switch", balance_loss=0.5),
}


def step(layout: dict[str, int], kind: str, adapted: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients of the routers."""
    config = (
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"]) if adapted else None
    )
    parallel = ParallelConfig(**layout)
    model = hfscale.from_config(
        CONFIG, parallel=parallel, routing=ROUTINGS[kind], peft_config=config, dtype=torch.float64
    ).train()
    ids = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(1))
    rows = ids.chunk(parallel.batch_world)[hfscale.batch_rank(model)]
    loss = hfscale.train_step(model, {"input_ids": rows, "labels": rows})
    found = {}
    for planned, parameter in runtime_of(model).parameters():
        if "gate.modules_to_save" in planned.name or (
            not adapted and "mlp.gate.weight" in planned.name
        ):
            found[planned.name.replace("modules_to_save.default.", "")] = local_tensor(
                parameter.grad
            ).clone()
    return loss.item(), found


@pytest.mark.parametrize("kind", ROUTINGS)
def test_its_losses_reach_it(pools: Pools, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        loss, expected = step({}, kind, adapted=False)
        _same(step({}, kind, adapted=True), loss, expected)
    for layout in (
        {"tp_size": 2},
        {"tp_size": 2, "ep_size": 2},
        {"tp_size": 2, "sequence_parallel": True},
    ):
        for found in pools(2).run(step, layout, kind, True):
            _same(found, loss, expected)
    for found in pools(2).run(step, {"dp_replicate_size": 2}, kind, True):
        _same(found, loss, expected)


def _same(found: tuple[float, dict[str, Any]], loss: float, expected: dict[str, Tensor]) -> None:
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert found[1].keys() == expected.keys() != set()
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)
