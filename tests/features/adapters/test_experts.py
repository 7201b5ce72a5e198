"""LoRA on fused experts over every layout equals stock PEFT in one process."""

from collections.abc import Callable
from typing import Any

import pytest
from peft import LoraConfig

from hfscale import ParallelConfig
from hfscale.testing import Case, RankPool, assert_layout_equal

from ...mixtures import EAGER, gpt_oss, qwen2_moe, qwen3_moe

Pools = Callable[[int], RankPool]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "shard2": {"dp_shard_size": 2},
    "ep2": {"ep_size": 2},
    "ep2-tp2": {"ep_size": 2, "tp_size": 2},
    "ep2-tp2-sequence": {"ep_size": 2, "tp_size": 2, "sequence_parallel": True},
    "ep2-of-tp2": {"ep_size": 2, "tp_size": 2, "dp_shard_size": 2, "expert_tp_size": 2},
    "ep2-shard4": {"ep_size": 2, "dp_shard_size": 4},
    "ep2-replicate2": {"ep_size": 2, "dp_replicate_size": 2},
    "ep2-pp2": {"ep_size": 2, "pp_size": 2, "dp_shard_size": 2, "num_microbatches": 2},
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _lora(**changes: Any) -> LoraConfig:
    given = {
        "r": 3,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": BOTH,
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**{**given, **changes})


def _check(pools: Pools, case: Case, layout: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    case.hf_kwargs = EAGER
    assert_layout_equal(
        case, parallel, pools(parallel.total_size) if parallel.total_size > 1 else None
    )


@pytest.mark.daily("ep2-tp2-sequence")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_experts(pools: Pools, layout: str) -> None:
    _check(pools, Case(qwen3_moe(), peft=_lora()), layout)


@pytest.mark.daily("ep2-of-tp2")
@pytest.mark.parametrize("layout", ["one", "tp2", "ep2", "ep2-of-tp2"])
def test_transposed_weights_with_biases(pools: Pools, layout: str) -> None:
    _check(pools, Case(gpt_oss(), peft=_lora()), layout)


@pytest.mark.daily("ep2-tp2")
@pytest.mark.parametrize("layout", ["tp2", "ep2", "ep2-tp2"])
def test_experts_alone_and_one_projection_of_them(pools: Pools, layout: str) -> None:
    _check(
        pools, Case(qwen2_moe(), peft=_lora(target_modules=[], target_parameters=BOTH[1:])), layout
    )


@pytest.mark.daily("tp2")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
@pytest.mark.parametrize("layout", ["one", "ep2", "tp2"])
def test_names_of_projections_that_are_fused_now(pools: Pools, layout: str) -> None:
    """PEFT translates targets of older transformers into parameters of experts, with ranks of their own."""
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    _check(
        pools, Case(qwen3_moe(), peft=_lora(target_modules=targets, target_parameters=None)), layout
    )


def test_around_a_mixture_that_computes_already(pools: Pools) -> None:
    _check(pools, Case(qwen3_moe(), peft=_lora(), peft_build="get_peft_model"), "ep2-tp2")
