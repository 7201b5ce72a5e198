"""fp8 in an Accelerator's loop, in Trainer, and with compressed gradients; tests/recipes has it in recipes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor
from tests.float8_reference import convert

from ...integrations import test_accelerator as accelerator
from ...integrations.trainer import script as trainer
from ...sweeps import cases
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
SIZES: dict[str, Any] = {"intermediate_size": 48}


def inside(module: torch.nn.Module, name: str) -> bool:
    return ".layers." in name


@pytest.mark.parametrize(
    "layout", cases([{"dp_shard_size": 2}, {"tp_size": 2}], daily=[{"dp_shard_size": 2}])
)
def test_an_accelerators_loop_equals_one_process(
    pools: Pools, layout: dict[str, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(tiny("llama", **SIZES), dtype=torch.float64)
    stock.save_pretrained(tmp_path / "start")
    convert(stock, "tensorwise", inside)
    found = pools(2).run(
        accelerator.train, str(tmp_path / "start"), layout, str(tmp_path / "out"), "fp8"
    )
    # Scales are of a microbatch.
    norms = accelerator.train_stock(stock, 4 * ParallelConfig(**layout).batch_world, 2)
    accelerator.assert_trained_alike(found, norms, tmp_path / "out", stock)


# Stages cut a batch, that of an evaluation too, into microbatches, of which scales are: one, as in one process.
STAGES = {"pp_size": 2, "num_microbatches": 1}


@pytest.mark.parametrize(
    "layout", cases([{"cp_size": 2}, {"tp_size": 2}, STAGES], daily=[{"cp_size": 2}])
)
def test_trainer_equals_one_process(pools: Pools, layout: dict[str, int], tmp_path: Path) -> None:
    """Arguments say bf16, which is what is around the products; context ranks shard weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama", **SIZES), dtype=torch.float64).save_pretrained(
        tmp_path
    )
    load = {"mixed_precision": "fp8", "dtype": torch.float64}
    asked = trainer.Case(
        {"bf16": True, "num_train_epochs": 1}, load=load, rows=8, evaluated=4, metrics=False
    )
    plain = trainer.Case(
        asked.arguments, {**load, "mixed_precision": "bf16"}, rows=8, evaluated=4, metrics=False
    )
    one, other = (
        trainer.run(each, str(tmp_path), str(tmp_path / "one"), {}) for each in (asked, plain)
    )
    assert one["history"][0]["loss"] != other["history"][0]["loss"]
    for found in pools(2).run(trainer.run, asked, str(tmp_path), str(tmp_path / "two"), layout):
        trainer.assert_equal(found, one, layout)


def gradients(compression: dict[str, Any]) -> list[Tensor]:
    """Of a step over a few tokens, so that they are of low rank."""
    torch.manual_seed(0)
    config = tiny("llama", hidden_size=64, intermediate_size=64, num_key_value_heads=4)
    layout = ParallelConfig(dp_replicate_size=2, **compression)
    model = hfscale.from_config(
        config, parallel=layout, mixed_precision="fp8", dtype=torch.float64
    ).train()
    batches = [
        ragged_batch(torch.Generator().manual_seed(seed), 67, 1, 4, False) for seed in range(2)
    ]
    for batch in batches:
        batch["labels"] = batch["input_ids"].clone()
    hfscale.train_step(model, batches[hfscale.batch_rank(model)])
    return [
        local_tensor(p.grad).clone()
        for planned, p in runtime_of(model).parameters()
        if ".layers." in planned.name
    ]


@pytest.mark.parametrize(
    ("compression", "apart"),
    [
        ({"gradient_compression": "bf16"}, 2**-7),
        ({"gradient_compression": "powersgd", "powersgd_rank": 8}, 1e-9),
    ],
    ids=["bf16", "powersgd"],
)
def test_compressed_gradients(pools: Pools, compression: dict[str, Any], apart: float) -> None:
    """Rounded products of eight tokens are of rank eight, which factors of that rank lose nothing of."""
    pool = pools(2)
    for plain, found in zip(pool.run(gradients, {}), pool.run(gradients, compression), strict=True):
        differs = [
            float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, found, strict=True)
        ]
        assert 0 < max(differs) < apart
