"""Bytes of a rank from a plan alone."""

from math import prod
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BitsAndBytesConfig, LlamaConfig

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig
from hfscale.cost.model.layer_bytes import stream_width
from hfscale.cost.model.memory_model import OVERHEAD, estimate_memory
from hfscale.cost.model.optimizer_bytes import NAMES
from hfscale.models.clone import tiny_clone
from hfscale.models.module_kinds import experts_per_token
from hfscale.optim.catalog import CHOICES
from scripts.long_goals import count

from ..sweeps import cases
from ..tiny_models import tiny

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)


def test_every_optimizer_is_known() -> None:
    assert set(NAMES) == set(CHOICES)


def test_llama_of_8_billion() -> None:
    plan = hfscale.plan(LLAMA_8B, dtype=torch.bfloat16)
    numbers = sum(prod(p.shape) for p in plan.owned())
    found = estimate_memory(plan, tokens=2048)
    assert (found.weights, found.gradients, found.adapters) == (2 * numbers, 2 * numbers, 0)
    assert found.optimizer == 4 * numbers + 4 * len(list(plan.owned()))
    # per token: 8 + 2k + 4f units of 2 bytes, and 2 more where norms keep their inputs in 32 bits; k = 1/4, f = 3.5
    layers = 32 * 2048 * 4096 * 2 * (8 + 2 + 2 / 4 + 4 * 3.5)
    assert found.activations == pytest.approx(layers, rel=0.02)
    assert found.total == sum(found.kinds.values())


@pytest.mark.parametrize("axis", ["tp_size", "dp_shard_size", "pp_size"])
def test_shares_add_up(axis: str) -> None:
    """Over four ranks, weights are those of one process, and what is whole on every tensor rank."""
    config = tiny(
        "llama",
        num_hidden_layers=4,
        num_key_value_heads=4,
        num_attention_heads=4,
        intermediate_size=48,
    )
    alone = estimate_memory(hfscale.plan(config), optimizer="sgd")
    plan = hfscale.plan(config, ParallelConfig(**{axis: 4}))
    name = axis.removesuffix("_size")
    ranks = [
        estimate_memory(plan, {name: rank}, pp_rank=rank if name == "pp" else 0, optimizer="sgd")
        for rank in range(4)
    ]
    whole = 3 * 4 * 32 * (2 * 4 + 1) if name == "tp" else 0  # norms
    padding = (4 - 67 % 4) * 2 * 32 * 4 if name == "dp_shard" else 0
    assert sum(rank.weights for rank in ranks) == alone.weights + whole + padding
    assert [rank.gradients for rank in ranks] == [rank.weights for rank in ranks]
    assert all(rank.optimizer == 0 for rank in ranks)


def test_microbatches_that_are_alive() -> None:
    plan = hfscale.plan(tiny("llama", num_hidden_layers=4), ParallelConfig(pp_size=2))
    one, two = (estimate_memory(plan, in_flight=(count, 1), tokens=64) for count in (1, 2))
    assert two.activations == 2 * one.activations
    assert two.loss == 0  # the last stage's


def test_gathered() -> None:
    plan = hfscale.plan(tiny("llama"), ParallelConfig(dp_shard_size=2))
    layer = sum(prod(p.shape) for p in plan.owned() if p.name.startswith("model.layers.0."))
    root = sum(prod(p.shape) for p in plan.owned() if ".layers." not in p.name)
    assert estimate_memory(plan).gathered == 4 * (layer + root)
    assert estimate_memory(plan, mixed_precision="bf16").gathered == 2 * (layer + root)
    assert estimate_memory(hfscale.plan(tiny("llama"))).gathered == 0


def test_frozen_quantized_weights() -> None:
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    plan = hfscale.plan(LLAMA_8B, dtype=torch.bfloat16, quantization_config=quantization)
    found = estimate_memory(plan, trained=())
    in_layers = sum(
        prod(p.shape)
        for p in plan.owned()
        if p.name.startswith("model.layers.") and len(p.shape) == 2
    )
    around = 2 * 128256 * 4096 * 2
    assert found.weights == pytest.approx(in_layers * (0.5 + 0.127 / 8) + around, rel=1e-3)
    assert found.gradients == found.optimizer == 0


def test_it_reads_like_a_table() -> None:
    found = str(
        hfscale.memory_estimate(hfscale.plan(LLAMA_8B, ParallelConfig(tp_size=2)), tokens=4096)
    )
    lines = found.splitlines()
    assert [line.split()[0] for line in lines[:10]] == [
        "weights",
        "adapters",
        "gradients",
        "optimizer",
        "activations",
        "backward",
        "gathered",
        "exchanged",
        "loss",
        "total",
    ]
    assert lines[0].endswith("GiB")
    assert lines[-1].startswith(
        "activations: counted for this kind of layer, of 4,096 tokens a microbatch"
    )


def test_a_family_that_has_eager_attention_only_keeps_scores() -> None:
    plan = hfscale.plan(tiny_clone(AutoConfig.for_model("bloom"), n_head=8))
    short, long = (estimate_memory(plan, tokens=64, sequence_length=length) for length in (16, 64))
    assert long.activations - short.activations == 64 * (64 - 16) * 8 * 4 * len(plan.layers)
    assert "eager attention keeps scores of 8 heads over sequences of 16 tokens" in str(short)
    assert estimate_memory(
        hfscale.plan(tiny("llama")), tokens=64, sequence_length=16
    ) == estimate_memory(hfscale.plan(tiny("llama")), tokens=64)


def test_an_optimizer_that_cannot_step_on_the_host_is_refused_with_the_plan() -> None:
    plan = hfscale.plan(tiny("llama"), memory=MemoryConfig(offload_optimizer=True))
    with pytest.raises(
        ConfigError, match=r"offload_optimizer=True needs an optimizer that can .* got 'adafactor'"
    ):
        hfscale.memory_estimate(plan, "adafactor")
    assert hfscale.memory_estimate(plan, "adamw_8bit").on_host


def test_widths() -> None:
    assert stream_width(hfscale.plan(LLAMA_8B), "model.layers.0") == 4096
    assert stream_width(hfscale.plan(tiny("gpt2")), "transformer.h.0") == 32
    assert experts_per_token(LLAMA_8B) is None


WIDE = LlamaConfig(
    hidden_size=256, intermediate_size=896, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=64, max_position_embeddings=2**16,
)  # fmt: skip
LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "elementwise": {"recompute": "elementwise"},
    "tiles": {"recompute": "full", "tile_tokens": 2048},
    "tiles, on the host": {"recompute": "full", "tile_tokens": 2048, "offload_activations": "1KiB"},
}


@pytest.mark.parametrize("levers", cases(LEVERS, daily=["none"]))
def test_all_that_there_is_at_once(levers: str) -> None:
    """Gradients of activations included, by a step on the meta device, where backward passes hold most."""
    for tokens in (4096, 8192):
        found = count(WIDE, tokens, **LEVERS[levers])
        assert found.estimated - OVERHEAD == pytest.approx(
            found.device + found.optimizer, rel=0.03
        ), tokens
