"""``"bf16_params"`` in Accelerator and Trainer, over 4 bits, without a flush and compiled; tests/recipes has recipes.

Casts are to float64 here, but for a base in 4 bits and compiled layers; weights are in float32.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.config.options import MIXED_PRECISIONS
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime import Runtime, runtime_of

from ...integrations import test_accelerator as accelerator
from ...integrations.trainer import script as trainer
from ...sweeps import cases
from ...tiny_models import tiny
from ..quantization import models as quantized, test_training as quantized_steps

Pools = Callable[[int], RankPool]
CAST: dict[str, Any] = {"mixed_precision": "bf16_params", "dtype": torch.float32}
STAGES = {"pp_size": 2, "num_microbatches": 2}


def in_64_bits(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same where 64 bits are what is cast to; losses are in 32, as on stages that have none."""
    stock = Runtime.sum_of_shares
    in_32_bits = patch.object(
        Runtime, "sum_of_shares", lambda runtime, total: stock(runtime, total.float())
    )
    with patch.dict(MIXED_PRECISIONS, bf16_params=torch.float64), in_32_bits:
        return function(*args, **kwargs)


def exactly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same, without casts to 32 bits inside."""
    with keep_float64():
        return in_64_bits(function, *args, **kwargs)


@pytest.mark.parametrize(
    "layout", cases([{}, {"dp_shard_size": 2}, {"tp_size": 2}], daily=[{"tp_size": 2}])
)
def test_an_accelerators_loop_equals_one_process(
    pools: Pools, layout: dict[str, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32)
    stock.save_pretrained(tmp_path / "start")
    told = str(tmp_path / "start"), layout, str(tmp_path / "out"), "bf16_params"
    parallel = ParallelConfig(**layout)
    found = pools(parallel.total_size).run(exactly, accelerator.train, *told, dtype=torch.float32)
    norms = accelerator.train_stock(stock.double(), 4 * parallel.batch_world)
    accelerator.assert_trained_alike(found, norms, tmp_path / "out", stock)


TRAINED = [{}, {"dp_shard_size": 2}, {"tp_size": 2}, STAGES, {"cp_size": 2}]


@pytest.mark.parametrize("layout", cases(TRAINED, daily=[{"dp_shard_size": 2}]))
def test_trainer_equals_stock_trainer(pools: Pools, layout: dict[str, int], tmp_path: Path) -> None:
    """Arguments say bf16=True, which does not put autocast around the casts."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).save_pretrained(tmp_path)
    asked = trainer.Case({"bf16": True, "num_train_epochs": 1}, load=CAST)
    plain = trainer.Case({"num_train_epochs": 1})
    expected = trainer.run(plain, str(tmp_path), str(tmp_path / "one"), None)
    ranks = pools(ParallelConfig(**layout).total_size)
    for found in ranks.run(
        in_64_bits, trainer.run, asked, str(tmp_path), str(tmp_path / "two"), layout
    ):
        trainer.assert_equal(found, expected, layout)


@pytest.mark.parametrize("layout", cases([{}, {"dp_shard_size": 2}], daily=[{}]))
def test_a_base_in_4_bits_computes_as_one_whose_other_parameters_are_in_16(
    pools: Pools, layout: dict[str, int], tmp_path: Path
) -> None:
    path = quantized.save(quantized.wide("llama", attention_bias=True), tmp_path)
    config = quantized.four_bits(bnb_4bit_compute_dtype=torch.bfloat16)
    reference = quantized.stock(path, config).train()
    for parameter in reference.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    expected = quantized.through(reference, 256, torch.bfloat16)
    ranks = pools(ParallelConfig(**layout).total_size)
    for found in ranks.run(quantized_steps.pass_of, path, layout, config, 2, False, "bf16_params"):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def adapted(path: str, layout: dict[str, int], precision: str) -> list[float]:
    """Losses and norms of two steps of adapters over a base in 4 bits."""
    given: dict[str, Any] = {
        "peft_config": trainer.peft.LoraConfig(r=4, target_modules="all-linear")
    }
    torch.manual_seed(0)
    model = quantized.load(
        path, layout, quantized.four_bits(), mixed_precision=precision, **given
    ).train()
    optimizer = hfscale.create_optimizer(model, "sgd", lr=1e-2)
    found = list[float]()
    ids = quantized.tokens(4)[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    for _ in range(2):
        optimizer.zero_grad()
        found.append(float(hfscale.train_step(model, {"input_ids": ids, "labels": ids})))
        found.append(float(hfscale.clip_grad_norm_(model, 1.0)))
        optimizer.step()
    return found


@pytest.mark.parametrize(
    "layout", cases([{}, {"tp_size": 2}, STAGES, {"dp_shard_size": 2}], daily=[STAGES])
)
def test_adapters_over_a_base_in_4_bits(
    pools: Pools, layout: dict[str, int], tmp_path: Path
) -> None:
    path = quantized.save(quantized.wide("llama"), tmp_path)
    expected = pools(1).run(adapted, path, {}, "no")[0]
    for found in pools(ParallelConfig(**layout).total_size).run(
        in_64_bits, adapted, path, layout, "bf16_params"
    ):
        assert found == pytest.approx(expected, rel=1e-5)


def without_flush(layout: dict[str, Any], precision: str) -> dict[str, Tensor]:
    """Losses of five steps with a large rate, and the weights after them."""
    torch.manual_seed(0)
    config = tiny("llama", num_hidden_layers=3)
    parallel = ParallelConfig(pp_size=2, **layout)
    model = hfscale.from_config(
        config, parallel=parallel, **{**CAST, "mixed_precision": precision}
    ).train()
    optimizer = hfscale.create_optimizer(model, "sgd", lr=0.3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(5):
        batches = [
            ragged_batch(generator, 60, 2, 12, masked=False)
            for _ in range(layout.get("num_microbatches", 1))
        ]
        losses.append(hfscale.train_step(model, batches).double())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(hfscale.eval_step(model, batches).double())
    for loss in hfscale.drain(model):
        losses.append(loss.double())
        optimizer.step()
        optimizer.zero_grad()
    found = {"losses": torch.stack([loss for loss in losses if loss == loss])}
    return found | {
        planned.name: p.detach().clone() for planned, p in runtime_of(model).parameters()
    }


@pytest.mark.parametrize("schedule", cases(["pipedream", "pipedream_2bw"], daily=["pipedream_2bw"]))
def test_stages_without_a_flush_cast_the_weights_of_each_microbatch(
    pools: Pools, schedule: str
) -> None:
    layout = {
        "pipeline_schedule": schedule,
        **({"num_microbatches": 2} if schedule == "pipedream_2bw" else {}),
    }
    exact = pools(2).run(without_flush, layout, "no")
    for found, expected in zip(
        pools(2).run(in_64_bits, without_flush, layout, "bf16_params"), exact, strict=True
    ):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


def compiled(how: bool | str) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step, and its gradients."""
    torch.manual_seed(0)
    model = hfscale.from_config(tiny("llama"), compile=how, **CAST).train()
    loss = hfscale.train_step(
        model, ragged_batch(torch.Generator().manual_seed(1), 60, 2, 12, masked=False)
    )
    return float(loss), {planned.name: p.grad for planned, p in runtime_of(model).parameters()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at the copies'
def test_compiled_layers_compute_the_same() -> None:
    (expected, gradients), (loss, found) = compiled(False), compiled("aot_eager")
    assert loss == expected
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
