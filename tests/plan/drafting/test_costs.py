"""What layers cost, and how they are shared out to stages."""

import time
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

from hfscale.parallel.pipeline.stage_costs import Cost, LayerCosts, layer_costs
from hfscale.plan import balance
from tests.tiny_models import tiny


def on_meta(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


# --- sharing out ------------------------------------------------------------------------------------------------------


def _by_force(work: list[int], stages: int, first: int, last: int) -> tuple[int, ...]:
    def key(counts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        sizes = []
        start = 0
        for index, count in enumerate(counts):
            sizes.append(
                sum(work[start : start + count])
                + first * (index == 0)
                + last * (index == stages - 1)
            )
            start += count
        return max(sizes), sum(count**2 for count in counts), counts

    borders = combinations(range(1, len(work)), stages - 1)
    return min(
        (tuple(b - a for a, b in zip((0, *c), (*c, len(work)), strict=True)) for c in borders),
        key=key,
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_balance_is_the_best_there_is(data: st.DataObject) -> None:
    work = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(work)))
    first = data.draw(st.integers(0, 20))
    last = data.draw(st.integers(0, 20))
    assert balance(work, stages, first, last) == _by_force(work, stages, first, last)


def test_balance() -> None:
    assert balance([1] * 8, 4) == (2, 2, 2, 2)
    assert balance([1] * 7, 4) == (1, 2, 2, 2)  # the front keeps most microbatches
    assert balance([1] * 8, 4, last=2) == (2, 2, 3, 1)  # (2, 3, 2, 1) and (3, 2, 2, 1) are as good
    assert balance([1] * 8, 2, last=100) == (7, 1)
    assert balance([5, 1, 1, 1, 1, 1], 2) == (1, 5)
    start = time.process_time()
    assert sum(balance([3, 4] * 64, 64, 5, 9)) == 128
    assert time.process_time() - start < 5
    with pytest.raises(ValueError, match="3 layers cannot be shared out to 4 stages"):
        balance([1, 1, 1], 4)


# --- what things cost -------------------------------------------------------------------------------------------------


def test_cost_of_llama() -> None:
    model = on_meta(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=100,
        )
    )
    layers = [f"model.layers.{index}" for index in range(3)]
    costs = layer_costs(
        model, layers, ["model.embed_tokens"], ["model.norm", "lm_head"], sequence=10
    )
    projections = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    assert costs.layers == (Cost(2 * projections + 2 * 2 * 10 * 64, projections + 2 * 64),) * 3
    assert costs.before == Cost(0, 6400)  # a lookup
    assert costs.after == Cost(2 * 6400, 6400 + 64)
    one, two = costs.of_stages((1, 2))
    assert one == costs.before + costs.layers[0]
    assert two.flops == 2 * costs.layers[0].flops + 2 * 6400


def test_experts_cost_what_is_active_of_them() -> None:
    model = on_meta(
        MixtralConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=1,
            vocab_size=67,
        )
    )
    (cost,) = layer_costs(model, ["model.layers.0"], sequence=0).layers
    attention = 32 * 32 * 2 + 32 * 16 * 2
    experts = 4 * 3 * 32 * 48
    router = 4 * 32
    assert cost.flops == 2 * (attention + experts // 4 + router)
    assert cost.parameters == attention + experts + router + 2 * 32


def test_conv1d_and_learned_positions() -> None:
    model = on_meta(tiny("gpt2"))
    costs = layer_costs(
        model, ["transformer.h.0"], ["transformer.wte", "transformer.wpe"], sequence=0
    )
    assert costs.layers[0].flops == 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)
    assert costs.before == Cost(0, 67 * 32 + 64 * 32)


def test_work_weighs_parameters_where_batches_are_small() -> None:
    light = Cost(flops=100, parameters=10)
    heavy = Cost(flops=0, parameters=50)
    assert light.work(1 << 20) > heavy.work(1 << 20)
    assert light.work(1) < heavy.work(1)
    assert LayerCosts(Cost(), (light,) * 4, Cost(0, 10)).balanced(2) == (2, 2)
    assert LayerCosts(Cost(), (light,) * 4, light + light + light).balanced(2) == (3, 1)


def test_what_every_stage_has() -> None:
    layer = Cost(4, 1)
    shared = Cost(2, 3)
    costs = LayerCosts(Cost(), (layer,) * 4, Cost(0, 5), shared=shared)
    assert costs.of_stages((2, 2)) == (Cost(10, 5), Cost(10, 10))
    assert costs.balanced(2) == LayerCosts(Cost(), (layer,) * 4, Cost(0, 5)).balanced(2)
