"""Shapes beyond the dense Llama: mixtures of experts, latent attention, sinks, wide norms, scaled and capped logits.

`scripts/family_sweep.py` runs every family; these few stand for the mechanisms in the everyday tests.
"""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig

from hfscale import ParallelConfig, plan
from hfscale.testing import Case, RankPool, assert_layout_equal
from hfscale.testing.clone import tiny_clone

Pools = Callable[[int], RankPool]
EAGER = {"experts_implementation": "eager"}  # the host's grouped matrix products take no float64
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({}, EAGER),
    "qwen2_moe": ({"decoder_sparse_step": 2}, EAGER),  # a dense layer, then a mixture with a shared expert
    "deepseek_v2": ({"num_experts_per_tok": 2, "topk_method": "greedy"}, EAGER),
    "granite_swa": ({}, {}),  # one attention sink per head
    "olmo2": ({}, {}),  # norms across all heads
    "olmoe": ({}, EAGER),  # the same in a mixture: its attention is kept whole
    # its head comes before its base model, which the host ties the other way round
    "camembert": ({"pad_token_id": 1, "is_decoder": True}, {}),
    "gemma2": ({}, {}),  # a scaled embedding tied to the head, capped logits
}


def case(family: str) -> Case:
    changes, kwargs = FAMILIES[family]
    return Case(tiny_clone(AutoConfig.for_model(family), **{"pad_token_id": None, **changes}), hf_kwargs=kwargs)


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(pools: Pools, family: str, layout: dict[str, int]) -> None:
    parallel = ParallelConfig(**layout)
    assert_layout_equal(case(family), parallel, pools(parallel.total_size))


def test_experts_are_cut_inside_and_routers_are_not() -> None:
    planned = plan(case("qwen2_moe").config, ParallelConfig(tp_size=2)).by_name
    assert planned["model.layers.1.mlp.experts.gate_up_proj"].local_shape({}) == (4, 24, 32)
    assert planned["model.layers.1.mlp.shared_expert.up_proj.weight"].local_shape({}) == (12, 32)
    for name in ("gate.weight", "shared_expert_gate.weight"):
        assert planned[f"model.layers.1.mlp.{name}"].cuts == ()
        assert planned[f"model.layers.1.mlp.{name}"].partial == ("tp",)
    assert planned["model.layers.0.mlp.up_proj.weight"].local_shape({}) == (24, 32)
