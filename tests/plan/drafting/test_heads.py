"""Which tensor sizes fit how many heads, and what the plan makes of key/value heads fewer than ranks."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.api.build_plan import build_plan
from hfscale.errors import PlanError
from hfscale.models import FAMILIES
from hfscale.models.blueprint import Block, Blueprint
from hfscale.models.clone import tiny_clone
from hfscale.plan import Cut, Plan
from hfscale.plan.table import to_json

from ...tiny_models import tiny


def _plan(config: Any, tp: int, **sizes: int) -> Plan:
    return hfscale.plan(config, ParallelConfig(tp_size=tp, **sizes))


def _refusal(config: Any, tp: int) -> str:
    with pytest.raises(PlanError) as caught:
        _plan(config, tp)
    (problem,) = str(caught.value).split("\n  - ")[1:]
    return problem


def test_key_value_heads_are_copied_to_consecutive_ranks() -> None:
    plan = _plan(tiny("llama", attention_bias=True), 4)  # 4 heads, 2 key/value heads
    for projection in ("k_proj", "v_proj"):
        for name in ("weight", "bias"):
            planned = plan.by_name[f"model.layers.0.self_attn.{projection}.{name}"]
            assert planned.cuts == (Cut("tp", 0, 4, replicas=(2,)),)
            assert (planned.replicas, planned.partial) == (2, ())
    assert plan.by_name["model.layers.0.self_attn.q_proj.weight"].cuts == (Cut("tp", 0, 4),)
    assert plan.replicas == (2,)
    assert plan.blocks[0].local_attributes == (("num_key_value_groups", 2),)
    weight = plan.by_name["model.layers.0.self_attn.k_proj.weight"]
    rows = [weight.take(torch.arange(16), {"tp": rank}).tolist() for rank in range(4)]
    assert rows == [[*range(8)], [*range(8)], [*range(8, 16)], [*range(8, 16)]]


def test_no_copies_where_there_are_enough_heads() -> None:
    plan = _plan(tiny("llama"), 2)
    assert plan.replicas == ()
    assert plan.blocks[0].local_attributes == ()
    assert all(
        planned.replicas == 1 and planned.counted({"tp": 1}) is None for planned in plan.parameters
    )


def test_of_a_fused_projection_keys_and_values_are_copied() -> None:
    plan = _plan(
        tiny_clone(AutoConfig.for_model("phi3"), num_key_value_heads=1, pad_token_id=None), 4
    )
    planned = plan.by_name["model.layers.0.self_attn.qkv_proj.weight"]
    assert planned.cuts == (Cut("tp", 0, 4, (32, 8, 8), (1, 4, 4)),)
    assert planned.local_shape({"tp": 3}) == (24, 32)
    assert dict(plan.blocks[0].local_attributes) == {
        "num_key_value_heads": 1,
        "num_key_value_groups": 4,
    }
    assert plan.blocks[0].local_config == (("num_attention_heads", 4),)


def test_the_table_and_the_json_say_so() -> None:
    plan = _plan(tiny("llama"), 4, dp_shard_size=2)
    (line,) = [
        line
        for line in str(plan).splitlines()
        if line.startswith("model.layers.*.self_attn.k_proj.weight")
    ]
    assert "dim 0 / tp4, each on 2 ranks, dim 0 / dp_shard2" in line
    assert line.endswith("sum over the 2 ranks with the same heads, reduce-scatter over dp_shard")
    row = next(
        row for row in json.loads(to_json(plan))["parameters"] if "k_proj.weight" in row["name"]
    )
    assert row["copies"] == 2
    assert row["cuts"][0]["copies"] == [2]


@pytest.mark.parametrize(
    ("heads", "key_heads", "tp", "valid"),
    [
        (12, 4, 6, "1, 2, 4, 12"),  # 6 ranks would hold two thirds of a key/value head each
        (12, 4, 5, "1, 2, 4, 12"),
        (4, 1, 8, "1, 2, 4"),
        (6, 6, 4, "1, 2, 3, 6"),
    ],
)
def test_head_counts_that_do_not_fit_are_refused(
    heads: int, key_heads: int, tp: int, valid: str
) -> None:
    config = tiny(
        "llama",
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        hidden_size=8 * heads,
        intermediate_size=48,
    )
    assert _refusal(config, tp) == (
        f"tp_size={tp} does not divide the {heads} attention heads and {key_heads} key/value heads of 'llama': "
        f"use tp_size {valid}"
    )
    for size in map(int, valid.split(", ")):
        _plan(config, size)


def test_key_value_heads_among_their_queries_are_not_copied() -> None:
    config = AutoConfig.for_model("falcon", new_decoder_architecture=True, num_kv_heads=2)
    config = tiny_clone(config, num_kv_heads=2, vocab_size=64)
    assert _refusal(config, 4).endswith(
        "4 attention heads and 2 key/value heads of 'falcon': use tp_size 1, 2"
    )


def test_heads_in_groups() -> None:
    # The halves of the heads are subtracted from one another.
    config = AutoConfig.for_model("diffllama")
    config = tiny_clone(config, num_attention_heads=8, num_key_value_heads=4, pad_token_id=None)
    planned = _plan(config, 4).by_name["model.layers.0.self_attn.k_proj.weight"]
    assert planned.cuts == (Cut("tp", 0, 4, (16, 16), (2, 2)),)
    assert "which come in 2 groups: use tp_size 1, 2, 4" in _refusal(config, 8)


def test_layers_with_counts_of_their_own() -> None:
    model = AutoModelForCausalLM.from_config(
        tiny("llama", num_hidden_layers=2, num_key_value_heads=4)
    )
    attention = model.model.layers[1].self_attn
    attention.num_key_value_groups = 4
    attention.k_proj, attention.v_proj = (torch.nn.Linear(32, 8, bias=False) for _ in range(2))
    plan = build_plan(model, ParallelConfig(tp_size=2))
    assert [
        plan.by_name[f"model.layers.{i}.self_attn.k_proj.weight"].replicas for i in range(2)
    ] == [1, 2]


def test_attention_that_does_not_say_how_queries_share_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = Block(column=("q_proj", "k_proj", "v_proj"), row=("o_proj",))
    monkeypatch.setitem(FAMILIES, "llama", Blueprint("layers", {"self_attn": attention}))
    model = AutoModelForCausalLM.from_config(tiny("llama"))
    for layer in model.model.layers:
        layer.self_attn.num_key_value_heads = 2
        del layer.self_attn.num_key_value_groups
    with pytest.raises(
        PlanError,
        match="name the attribute that counts key/value heads in local_attributes of the blueprint",
    ):
        build_plan(model, ParallelConfig(tp_size=4))
