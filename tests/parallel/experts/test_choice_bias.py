"""Biases that routers add to their scores for the choice alone are found by what they do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, RoutingConfig
from hfscale.extras.proofs.choice_bias import prove_choice_bias
from hfscale.parallel.experts.router_functions import bias_step
from hfscale.testing import RankPool
from hfscale.train.runtime.shards import local_tensor
from tests.parity.test_balance import _config, _microbatches
from tests.tiny_models import needs

Pools = Callable[[int], RankPool]
BIASES = {
    "deepseek_v3": "mlp.gate.e_score_correction_bias",
    "afmoe": "mlp.expert_bias",
    "ernie4_5_moe": "mlp.gate.moe_statics.e_score_correction_bias",
    "lfm2_moe": "feed_forward.expert_bias",
}


@pytest.mark.parametrize("family", BIASES)
def test_a_bias_moves_by_the_load(family: str) -> None:
    routing = RoutingConfig(bias_update_rate=0.01)
    model = hfscale.from_config(_config(family), dtype=torch.float32, routing=routing).train()
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    biases = {name: tensor for name, tensor in held.items() if name.endswith(BIASES[family])}
    before = {name: tensor.detach().clone() for name, tensor in biases.items()}
    hfscale.train_step(model, _microbatches())
    loads = {layer.name: torch.tensor(layer.tokens) for layer in hfscale.expert_load(model).layers}
    assert len(biases) == len(loads) > 0
    for name, bias in biases.items():
        (load,) = (
            load for layer, load in loads.items() if name.startswith(layer.rpartition(".")[0] + ".")
        )
        moved = (bias - before[name]).flatten().double()
        torch.testing.assert_close(moved, bias_step(load, 0.01), rtol=0, atol=1e-6)


def moved_over_data_ranks(family: str) -> list[tuple[Tensor, Tensor]]:
    """The shares that this rank has of biases that were zero, and the steps they should have taken."""
    layout = hfscale.ParallelConfig(dp_shard_size=2)
    routing = RoutingConfig(bias_update_rate=0.01)
    model = hfscale.from_config(
        _config(family), parallel=layout, dtype=torch.float32, routing=routing
    ).train()
    hfscale.train_step(model, _microbatches()[hfscale.batch_rank(model) :: 2])
    shares = [
        local_tensor(p) for name, p in model.named_parameters() if name.endswith(BIASES[family])
    ]
    loads = [torch.tensor(layer.tokens) for layer in hfscale.expert_load(model).layers]
    return [
        (share.detach(), bias_step(load, 0.01)) for share, load in zip(shares, loads, strict=True)
    ]


def test_shards_of_a_parameter_of_one_row(pools: Pools) -> None:
    """ernie keeps ``[1, experts]``, of which one data rank has all, and the other nothing."""
    first, second = pools(2).run(moved_over_data_ranks, "ernie4_5_moe")
    for (own, step), (other, _) in zip(first, second, strict=True):
        found = torch.cat([own, other]).flatten().double()
        torch.testing.assert_close(found, step, rtol=0, atol=1e-6)


@needs("zaya")
def test_a_bias_of_more_than_the_experts_is_named() -> None:
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = CONFIG_MAPPING["zaya"](**small, vocab_size=67, head_dim=8, intermediate_size=32)
    with pytest.raises(ConfigError, match=r"balancing_biases has \d+ entries for \d+ experts"):
        hfscale.from_config(config, routing=RoutingConfig(bias_update_rate=0.01))


def test_what_weighs_is_no_bias_of_the_choice() -> None:
    """gpt-oss adds a bias to the logits that also weigh; a vector that the router does not read is none either."""
    config = CONFIG_MAPPING["gpt_oss"](num_hidden_layers=2, vocab_size=67)
    with torch.device("meta"):
        stock: Any = AutoModelForCausalLM.from_config(config)
    assert prove_choice_bias(stock, type(stock)) == ({}, True)


def test_a_vector_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as stock

    build = stock.DeepseekV3TopkRouter.__init__

    def with_counter(self: Any, config: Any) -> None:
        build(self, config)
        counts: Tensor = torch.zeros(config.n_routed_experts)
        self.tokens_seen = nn.Buffer(counts)

    monkeypatch.setattr(stock.DeepseekV3TopkRouter, "__init__", with_counter)
    config = _config("deepseek_v3")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    found, _ = prove_choice_bias(model, type(model))
    assert found == {"model.layers.*.mlp.experts": "gate.e_score_correction_bias"}


def test_a_parameter_of_16_bits_is_refused() -> None:
    """Before transformers 5.24 it is made so; since then only a cast of the whole model does that."""
    stock: Any = AutoModelForCausalLM.from_config(_config("afmoe")).to(torch.bfloat16)
    with pytest.raises(
        ConfigError, match=r"expert_bias in 32 bits, but its dtype is torch\.bfloat16"
    ):
        hfscale.parallelize(stock, routing=RoutingConfig(bias_update_rate=0.01))
