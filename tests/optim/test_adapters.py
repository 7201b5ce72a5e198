"""Adapters are stepped like other parameters, and decay like the stock model's (trap T21)."""

from collections.abc import Callable
from typing import Any

import pytest
from peft import LoraConfig
from torch import Tensor

import hfscale
from hfscale import ParallelConfig
from hfscale.optim.factory import decays, owners_of
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..tiny_models import tiny
from .cases import run

Pools = Callable[[int], RankPool]
NAMES = ("adamw_torch", "adamw_8bit", "adafactor", "muon")


Weights = dict[str, dict[str, Tensor]]


def adapted(layout: dict[str, Any]) -> Any:
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return hfscale.from_config(
        tiny("llama"), parallel=ParallelConfig(**layout), peft_config=adapters
    )


def trained(layout: dict[str, Any], expected: Weights | None = None) -> Any:
    """Per optimizer: the adapters after a few steps; or the largest difference from the share of ``expected``."""
    found: dict[str, Any] = {}
    for name in NAMES:
        model = adapted(layout)
        options = {"min_8bit_size": 64} if "8bit" in name else {}
        run(
            model,
            "",
            hfscale.create_optimizer(model, name, lr=1e-2, weight_decay=0.1, **options),
            range(3),
        )
        runtime = runtime_of(model)
        live = [
            (planned, local_tensor(p.detach()))
            for planned, p in runtime.parameters()
            if p.requires_grad
        ]
        if expected is None:
            found[name] = {planned.name: weight for planned, weight in live}
        else:
            assert [planned.name for planned, _ in live] == list(expected[name])
            wanted = [
                planned.take(expected[name][planned.name], runtime.mesh.ranks)
                for planned, _ in live
            ]
            found[name] = max(
                float((w - other).abs().max()) for (_, w), other in zip(live, wanted, strict=True)
            )
    return found


@pytest.mark.parametrize(
    "layout", [{"tp_size": 2}, pytest.param({"dp_shard_size": 2}, marks=pytest.mark.slow)]
)
def test_adapters_of_one_process(pools: Pools, layout: dict[str, Any]) -> None:
    for found in pools(2).run(trained, layout, trained({})):
        assert found.pop("adafactor") <= 1e-7
        assert not any(found.values())


def decaying(model: Any) -> dict[str, bool]:
    owners = owners_of(model)
    return {
        planned.name: decays(planned.name, owners[id(p)])
        for planned, p in runtime_of(model).parameters()
    }


def test_what_decays_stays() -> None:
    before = decaying(hfscale.from_config(tiny("llama")))
    after = decaying(adapted({}))
    assert before.items() <= after.items()
    assert all(decay for name, decay in after.items() if name not in before)
    assert not all(before.values())
