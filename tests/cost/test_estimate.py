"""Seconds and bytes of a layout, from a plan alone."""

import json
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PreTrainedConfig,
)

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig
from hfscale.cli import main
from hfscale.cost.model.machines_known import evidence, find_machine, fitted, machine_names
from hfscale.cost.model.model_shape import shape_of_plan

from ..tiny_models import tiny

LLAMA = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)


def of(layout: dict[str, Any] | None = None, **changes: Any) -> Any:
    parallel = ParallelConfig(**(layout or {}))
    return hfscale.estimate(LLAMA, parallel, **{"dtype": torch.bfloat16, **changes})


def test_a_llama_over_three_axes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layout = {"tp_size": 2, "pp_size": 4, "dp_shard_size": 8, "sequence_parallel": True}
    found = of(layout, num_microbatches=16)
    plan = hfscale.plan(LLAMA, ParallelConfig(**layout), dtype=torch.bfloat16)
    assert found.fullest.memory == hfscale.memory_estimate(plan, tokens=4096, num_microbatches=16)
    assert (found.ranks, found.tokens, found.verdict) == (64, 64 * 4096 * 2, "fits")
    assert [stage.layers for stage in found.stages] == [2, 2, 3, 1]
    assert sum(found.time.terms.values()) == pytest.approx(found.seconds)
    assert 0.2 < found.mfu < 0.5
    data = json.loads(found.to_json())
    assert data["seconds"] == found.seconds
    assert len(data["stages"]) == 4
    table = str(found)
    assert all(f"\n{term}" in table for term in ("products", "bubble", "data", "total"))
    LLAMA.save_pretrained(tmp_path)
    argv = f"{tmp_path} --tp 2 --pp 4 --dp-shard 8 --sequence-parallel --microbatches 16 --dtype bfloat16 --json"
    assert main(["estimate", *argv.split()]) == 0
    assert json.loads(capsys.readouterr().out) == data


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_what_is_copied_to_the_host_is_what_measured_layers_keep(mixed: str) -> None:
    """Its seconds are those of the bytes that memory counts, of the same layers in the same precision."""
    found = hfscale.estimate(
        GPT2Config(n_embd=1024, n_layer=4, n_head=16, vocab_size=60000),
        num_microbatches=3,
        batch_size=32,
        sequence_length=1024,
        mixed_precision=mixed,
        dtype=torch.float32 if mixed == "bf16" else torch.bfloat16,
        memory=MemoryConfig(offload_activations=True),
    )
    (stage,) = found.stages
    link = fitted().memory * find_machine("h100").host_bandwidth
    copies = 3 * 2 * stage.memory.on_host / link
    assert found.time.offload > 0.01
    assert found.time.offload + 3 * stage.seconds == pytest.approx(copies, rel=1e-6)


def test_levers_do_what_they_do() -> None:
    plain = of({"dp_shard_size": 8})
    again = of({"dp_shard_size": 8}, memory=MemoryConfig(recompute="full"))
    assert again.time.products == pytest.approx(plain.time.products * 4 / 3)
    assert again.likely < plain.likely
    adapters = of(peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert adapters.time.products == pytest.approx(plain.time.products * 2 / 3, rel=0.02)
    assert adapters.fullest.memory.optimizer < 2**30 < plain.fullest.memory.optimizer * 8
    away = of({"dp_shard_size": 8}, memory=MemoryConfig(offload_optimizer=True))
    assert (away.fullest.memory.optimizer, plain.time.offload) == (0, 0.0)
    link = 0.8 * find_machine("h100").host_bandwidth  # the constants' share of a bandwidth
    entries = plain.fullest.memory.weights / 2
    # 6 bytes of weights and gradients for each, under an update of 36.
    assert away.time.offload == 0
    assert away.time.update == pytest.approx(36 * entries / link, rel=0.02)
    # What the passes do not hide.
    kept = of({"dp_shard_size": 8}, memory=MemoryConfig(offload_activations=True))
    moved = 2 * plain.fullest.memory.activations / link
    assert kept.time.offload == pytest.approx(moved - plain.stages[0].seconds, rel=0.1)
    assert kept.time.update == plain.time.update
    shards = of({"dp_shard_size": 8}, memory=MemoryConfig(offload_parameters=True))
    assert shards.needed < away.needed < plain.needed
    assert shards.time.offload == 0  # hidden: three times a shard of 0.5 GiB
    assert shards.time.update == pytest.approx(away.time.update)
    sizes = {size: of(batch_size=size) for size in (6, 8, 10)}
    assert {size: found.verdict for size, found in sizes.items()} == {
        6: "fits",
        8: "tight",
        10: "does not fit",
    }
    assert of(batch_size=10, hardware="h200").verdict == "fits"


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved1f1b", 2)])
def test_the_bubble_is_the_schedules_own(schedule: str, virtual: int) -> None:
    """What the other stages take of a microbatch, or half of it where each rank has two."""
    parallel = ParallelConfig(pp_size=4, pipeline_schedule=schedule, virtual_stages=virtual)
    found = hfscale.estimate(tiny("llama", num_hidden_layers=16), parallel, num_microbatches=16)
    seconds = sorted(stage.seconds for stage in found.stages)
    assert found.time.bubble == pytest.approx(sum(seconds[:-1]) / virtual, rel=0.1)


@pytest.mark.parametrize(
    "config",
    [
        tiny("llama"),
        tiny("gpt2"),
        tiny("qwen3"),
        MambaConfig(num_hidden_layers=2, hidden_size=64, vocab_size=99, state_size=8),
        Llama4TextConfig(
            hidden_size=64,
            intermediate_size=96,
            intermediate_size_mlp=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            vocab_size=99,
            pad_token_id=0,
        ),
        MixtralConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_local_experts=4,
            vocab_size=99,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_shapes_have_the_models_weights(config: PreTrainedConfig) -> None:
    plan = hfscale.plan(config)
    entries = sum(
        prod(p.shape) for p in plan.owned() if len(p.shape) > 1 and p.name.startswith(plan.layers)
    )
    for shape in (shape_of_plan(plan, config), shape_of_plan(plan)):
        assert shape.layers * shape.layer_weights == pytest.approx(entries, rel=0.01)
    assert shape_of_plan(plan, config).tied == config.tie_word_embeddings


def test_unknown_hardware_and_impossible_sizes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'h10' is unknown.*nearest by name: 'h100'"):
        of(hardware="h10")
    with pytest.raises(ConfigError, match="sequence_length=0 is invalid"):
        of(sequence_length=0)
    with pytest.raises(ConfigError, match="give the config instead of the plan"):
        hfscale.estimate(hfscale.plan(tiny("llama")), ParallelConfig(tp_size=2))
    wrong = tmp_path / "machine.json"
    wrong.write_text('{"name": "mine", "flops": -1}')
    with pytest.raises(
        ConfigError,
        match=r"does not describe a machine, because flops, memory_bandwidth.* must be positive",
    ):
        of(hardware=str(wrong))
    mine = replace(find_machine("h100"), name="mine", flops=2 * find_machine("h100").flops)
    wrong.write_text(json.dumps(asdict(mine)))
    assert of(hardware=str(wrong)).time.products == pytest.approx(of().time.products / 2)
    assert all(find_machine(name).sources for name in machine_names())


def test_machines_say_what_is_known_of_them(tmp_path: Path) -> None:
    measured = {name for name in machine_names() if "were measured on one" in evidence(name)[0]}
    assert measured == {"h100", "h200"}
    rates, seconds = evidence("rtx-4090")
    assert rates == (
        "NVIDIA GeForce RTX 4090 24 GB: 165.2 TFLOP/s in 16 bits, 330.3 in 8; memory 1008 GB/s; "
        "32 GB/s within a node of 8, 1.25 beyond; as its vendor says; "
        "nothing was measured on it (hfscale calibrate does)"
    )
    assert of(hardware="rtx-4090").notes[-2:] == (rates, seconds)
    own = tmp_path / "own.json"
    own.write_text(json.dumps(asdict(replace(find_machine("h100"), name="own"))))
    assert evidence(str(own))[0].endswith("; as its file says")


@pytest.mark.parametrize("name", machine_names())
def test_machines_are_plausible(name: str) -> None:
    machine = find_machine(name)
    assert 50e12 <= machine.flops <= 3e15
    assert machine.flops_8 is None or machine.flops_8 == pytest.approx(2 * machine.flops, rel=0.03)
    assert 0.3e12 <= machine.memory_bandwidth <= 10e12
    assert 20e9 <= machine.memory <= 300e9
    assert machine.nic_bandwidth <= machine.link_bandwidth <= machine.memory_bandwidth
    assert machine.host_bandwidth <= 0.5e12


def test_steps_that_were_measured_on_one_gpu() -> None:
    """Seconds within a tenth, and bytes within 3%, of the committed results."""
    from scripts.bench.fit_measured import estimated, measured

    steps = list(measured())
    assert {step.hardware for step in steps} == {"h100", "h200"}
    for step in steps:
        assert estimated(step, fitted()) == pytest.approx(step.seconds, rel=0.1), step.name
        if step.peak is not None:
            found = hfscale.estimate(
                step.config, hardware=step.hardware, sequence_length=2048, batch_size=step.batch,
                dtype=torch.bfloat16, **step.given,
            )  # fmt: skip
            assert found.needed == pytest.approx(step.peak, rel=0.03), step.name


def test_products_in_8_bits_have_their_own_rate() -> None:
    for name in ("h100", "gb200", "gb300", "b200"):
        plain, eight = (
            of(hardware=name, mixed_precision=precision) for precision in ("bf16", "fp8")
        )
        assert eight.time.products == pytest.approx(plain.time.products / 2, rel=0.01)
        assert eight.time.elementwise > plain.time.elementwise
    old = of(hardware="a100-80", mixed_precision="fp8")
    assert old.time.products == of(hardware="a100-80", mixed_precision="bf16").time.products
    assert find_machine("gb300").memory > find_machine("gb200").memory > find_machine("b200").memory


def test_mixtures_have_a_range() -> None:
    config = MixtralConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, vocab_size=1024
    )
    found = hfscale.estimate(
        config, ParallelConfig(ep_size=2, dp_shard_size=2), dtype=torch.bfloat16
    )
    note = next(
        note
        for note in found.notes
        if note.startswith("mixture: estimated with equally many tokens")
    )
    most = float(note.partition("up to ")[2].partition(" s")[0])
    assert 1.05 * found.seconds < most < 1.5 * found.seconds
