"""What expert parallelism plans: which parameters are spread, what is left to the tensor axis, what is refused."""

from typing import Any

import pytest

import hfscale
from hfscale import ParallelConfig, PlanError
from hfscale.plan import Cut, Plan

from ...mixtures import gpt_oss, qwen2_moe, qwen3_moe
from ...tiny_models import tiny

_MLP = "model.layers.0.mlp"
_GATE_UP = f"{_MLP}.experts.gate_up_proj"
_DOWN = f"{_MLP}.experts.down_proj"


def _plan(config: Any, **sizes: Any) -> Plan:
    return hfscale.plan(config, ParallelConfig(**sizes))


def test_whole_experts_are_spread_and_sharded_last() -> None:
    config = qwen3_moe(num_experts=8)
    cuts = {
        (("ep_size", 2),): (Cut("ep", 0, 2),),
        (("ep_size", 2), ("dp_shard_size", 4)): (Cut("ep", 0, 2), Cut("edp_shard", 0, 2)),
        (("ep_size", 2), ("dp_shard_size", 16)): (
            Cut("ep", 0, 2),
            Cut("edp_shard", 1, 8),
        ),  # 8 shards of 4 experts
        (("ep_size", 2), ("tp_size", 2)): (Cut("ep", 0, 2),),
        (("ep_size", 4), ("tp_size", 2), ("dp_replicate_size", 2)): (Cut("ep", 0, 4),),
    }
    for sizes, expected in cuts.items():
        assert _plan(config, **dict(sizes)).by_name[_DOWN].cuts == expected, sizes


def test_cut_experts_are_cut_like_the_dense_layers() -> None:
    planned = _plan(qwen3_moe(), ep_size=2, tp_size=2, expert_tp_size=2).by_name[_GATE_UP]
    assert [(cut.axis, cut.dim, len(cut.parts)) for cut in planned.cuts] == [
        ("ep", 0, 0),
        ("tp", 1, 2),
    ]


def test_a_shared_expert_is_a_block_of_its_own_and_the_router_is_whole() -> None:
    planned = _plan(qwen2_moe(), ep_size=2, tp_size=2)
    names = [block.name for block in planned.blocks]
    assert f"{_MLP}.shared_expert" in names
    assert _MLP not in names
    assert planned.by_name[f"{_MLP}.gate.weight"].partial == ()
    cut = _plan(qwen2_moe(), ep_size=2, tp_size=2, expert_tp_size=2)
    assert _MLP in [block.name for block in cut.blocks]
    assert cut.by_name[f"{_MLP}.gate.weight"].partial == ("tp",)
    sequence = _plan(qwen2_moe(), ep_size=2, tp_size=2, sequence_parallel=True)
    assert sequence.by_name[f"{_MLP}.gate.weight"].partial == ("tp",)
    assert not any("mlp" in name for name in sequence.sequence_regions[0].gathered)


def test_biases_of_experts_are_spread_with_them() -> None:
    planned = _plan(gpt_oss(), ep_size=2).by_name
    assert {
        name: planned[f"{_MLP}.{name}"].cuts for name in ("experts.down_proj_bias", "router.weight")
    } == {
        "experts.down_proj_bias": (Cut("ep", 0, 2),),
        "router.weight": (Cut("dp_shard", 0, 2),),
    }


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"ep_size": 2}, "two all-to-alls forward and two backward over ep2\n"),
        ({"ep_size": 4, "tp_size": 2}, "over ep4; each tensor rank sends its share of a batch\n"),
        (
            {"ep_size": 2, "tp_size": 2},
            "sends its share of a batch, or sums over them, whatever is fewer bytes\n",
        ),
    ],
)
def test_the_table_says_how_tokens_travel(sizes: dict[str, int], line: str) -> None:
    text = str(_plan(qwen3_moe(), **sizes))
    assert line in text
    assert f"experts: model.layers.*.mlp.experts x2, {4 // sizes['ep_size']} of 4 per rank" in text


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (
            qwen3_moe(),
            {"ep_size": 3},
            "ep_size=3 does not divide the 4 experts of .* use ep_size 1, 2, 4$",
        ),
        (tiny("llama"), {"ep_size": 2}, "LlamaForCausalLM has no such module: use ep_size=1$"),
    ],
)
def test_refused(config: Any, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _plan(config, **sizes)
