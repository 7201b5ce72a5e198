"""Adapters over a base in 4 bits (QLoRA): the same losses in every layout as with stock PEFT in one process."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.errors import ConfigError
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

from ...distributed.ops.pieces import as_on_gpus
from .models import Layout, four_bits, load, save, stock, tokens, wide
from .test_experts import LAYOUTS as EXPERT_LAYOUTS, mixture

Pools = Callable[[int], RankPool]

LAYOUTS: dict[str, Layout] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "sp2": {"tp_size": 2, "sequence_parallel": True},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "shard2": {"dp_shard_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
}
STEPS = 3
RATE = 20.0


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear")


def trained(path: str, layout: Layout, late: bool, state: str | None, bits: int = 4) -> list[float]:
    """Losses; with ``late``, of adapters that are put around a model that computes already."""
    config = four_bits() if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    model = load(path, layout, config, **({} if late else {"peft_config": lora()}))
    if late:
        hfscale.get_peft_model(model, lora(), seed=0)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    ids = tokens(4)[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    losses = []
    for step in range(STEPS):
        losses.append(float(hfscale.train_step(model, {"input_ids": ids, "labels": ids})))
        optimizer.step()
        optimizer.zero_grad()
        if state is not None and step == 0:
            hfscale.save_state(model, state, optimizer=optimizer)
    # The adapters go back to where they were after the first step; the base never moved.
    if state is not None:
        hfscale.load_state(model, state, optimizer=optimizer)
        again = float(hfscale.train_step(model, {"input_ids": ids, "labels": ids}))
        assert again == losses[1]
    assert all(not parameter.requires_grad for parameter in _base(model))
    return losses


def _base(model: Any) -> list[torch.Tensor]:
    runtime = runtime_of(model)
    assert runtime.plan.quantized is not None
    return [
        parameter
        for planned, parameter in runtime.parameters()
        if planned.name in runtime.plan.quantized.weights
    ]


def first_step(path: str) -> float:
    torch.manual_seed(0)
    model: Any = get_peft_model(stock(path, four_bits()), lora()).train()
    return float(model(input_ids=tokens(4), labels=tokens(4)).loss.detach())


@pytest.mark.daily("loaded-pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("late", [False, True], ids=["loaded", "late"])
def test_losses_do_not_depend_on_the_layout(
    pools: Pools, tmp_path: Path, late: bool, layout: str
) -> None:
    path = save(wide("llama"), tmp_path / "model")
    expected = trained(path, {}, False, None)
    assert expected[0] == pytest.approx(first_step(path), rel=1e-5)
    assert expected[2] < expected[1] < expected[0]
    world = ParallelConfig(**LAYOUTS[layout]).total_size
    state = str(tmp_path / "state")
    if world == 1:
        every = [trained(path, {}, late, state)]
    else:
        every = pools(world).run(trained, path, LAYOUTS[layout], late, state)
    for losses in every:
        assert losses == pytest.approx(expected, rel=2e-5)


def as_on_gpus_and_here(path: str) -> tuple[list[float], list[float], int]:
    """Losses with each data rank's row dequantized by itself, and with all at once; and how many rows were."""
    with as_on_gpus() as rows:
        apart = trained(path, {"dp_shard_size": 2}, False, None)
    return apart, trained(path, {"dp_shard_size": 2}, False, None), len(rows)


def test_rows_of_data_ranks_are_dequantized_apart(pools: Pools, tmp_path: Path) -> None:
    path = save(wide("llama"), tmp_path / "model")
    for apart, at_once, rows in pools(2).run(as_on_gpus_and_here, path):
        assert apart == at_once
        # Two rows of seven projections in two layers, forward and backward; nothing needs the first three's input.
        assert rows == STEPS * 2 * (2 * 2 * 7 - 3)


@pytest.mark.daily("late")
@pytest.mark.parametrize("late", [False, True], ids=["loaded", "late"])
def test_eight_bits(pools: Pools, tmp_path: Path, late: bool) -> None:
    path = save(wide("llama"), tmp_path / "model")
    expected = trained(path, {}, False, None, 8)
    for layout in ({"dp_shard_size": 2}, {"tp_size": 2}):
        for losses in pools(2).run(trained, path, layout, late, str(tmp_path / "state"), 8):
            assert losses == pytest.approx(expected, rel=1e-3 if "tp_size" in layout else 2e-5)


def experts_trained(path: str, layout: Layout, late: bool) -> list[float]:
    adapters = LoraConfig(
        r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    model = load(path, layout, four_bits(), **({} if late else {"peft_config": adapters}))
    if late:
        hfscale.get_peft_model(model, adapters, seed=0)
    model.train()
    # Routed sums of small experts.
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e5)
    ids = tokens(4)[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    losses = []
    for _ in range(STEPS):
        losses.append(float(hfscale.train_step(model, {"input_ids": ids, "labels": ids})))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.daily("late-tp2")
@pytest.mark.parametrize("layout", ["shard2", "tp2", "ep2-shard2", "ep2-shard4"])
@pytest.mark.parametrize("late", [False, True], ids=["loaded", "late"])
def test_factors_of_experts(pools: Pools, tmp_path: Path, late: bool, layout: str) -> None:
    path = save(mixture("qwen3_moe"), tmp_path)
    sizes = EXPERT_LAYOUTS[layout]
    expected = experts_trained(path, {}, late)
    assert expected[2] < expected[1] < expected[0]
    for losses in pools(ParallelConfig(**sizes).total_size).run(experts_trained, path, sizes, late):
        assert losses == pytest.approx(expected, rel=2e-5)


def refused_between(path: str, layout: Layout, bits: int, refused: bool) -> list[float]:
    """Losses and norms of two steps of a quantized model whose other weights train; between them, an adapter that is
    refused.
    """
    config = four_bits() if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    model = load(path, layout, config).train()
    ids = tokens(4)[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(2):
        if refused and step == 1:
            with pytest.raises(ConfigError, match="nothing_here"):
                hfscale.get_peft_model(model, LoraConfig(target_modules=["nothing_here"]))
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        found.append(float(hfscale.train_step(model, {"input_ids": ids, "labels": ids})))
        found.append(float(hfscale.clip_grad_norm_(model, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.daily("tp2-8")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["tp2", "shard2"])
def test_a_refused_adapter_leaves_a_quantized_model_as_it_was(
    pools: Pools, tmp_path: Path, layout: str, bits: int
) -> None:
    path = save(wide("llama"), tmp_path)
    expected = pools(2).run(refused_between, path, LAYOUTS[layout], bits, False)
    assert pools(2).run(refused_between, path, LAYOUTS[layout], bits, True) == expected


def test_what_is_trained_whole_is_not_quantized(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["q_proj"])
    path = save(wide("llama"), tmp_path)
    words = r"layers.0.self_attn.q_proj.weight is in 4 bits and gets no gradients: .*llm_int8_skip_modules=(\[.*\])\)"
    with pytest.raises(ConfigError, match=words) as caught:
        load(path, {}, four_bits(), peft_config=config)
    # What it says to do does.
    skipped = ast.literal_eval(re.search(r"\[.*\]", str(caught.value))[0])
    quantization = four_bits(llm_int8_skip_modules=skipped)
    model = load(path, {}, quantization, peft_config=config)
    assert any(
        "q_proj" in name and parameter.requires_grad for name, parameter in model.named_parameters()
    )
