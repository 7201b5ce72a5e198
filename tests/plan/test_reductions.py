"""What happens to gradients, as data."""

from typing import Any

import pytest
import torch

import hfscale
from hfscale import ParallelConfig
from hfscale.plan.parameter import Reduction
from tests.tiny_models import tiny

from ..families import config_of

_TIED = {"tie_word_embeddings": True, "num_hidden_layers": 4}
_HEADS = "model.layers.0.self_attn.k_proj.weight"
_NORM = "model.layers.0.input_layernorm.weight"
_EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("changes", "sizes", "name", "steps", "text"),
    [
        ({}, {}, _NORM, [], "complete"),
        (
            {},
            {"tp_size": 2, "sequence_parallel": True},
            _NORM,
            [Reduction("sum", "tp")],
            "sum over tp",
        ),
        (
            {},
            {"tp_size": 4, "dp_shard_size": 2},
            _HEADS,
            [Reduction("sum-replicas", "tp", replicas=2), Reduction("reduce-scatter", "dp_shard")],
            "sum over the 2 ranks with the same heads, reduce-scatter over dp_shard",
        ),
        (
            _TIED,
            {"pp_size": 2, "dp_replicate_size": 2},
            _EMBEDDING,
            [Reduction("sum-stages", "pp", stages=(0, 1)), Reduction("all-reduce", "dp_replicate")],
            "sum over stages 0, 1, all-reduce over dp_replicate",
        ),
    ],
)
def test_steps_of_a_gradient(
    changes: dict[str, Any], sizes: dict[str, Any], name: str, steps: list[Reduction], text: str
) -> None:
    plan = hfscale.plan(tiny("llama", **changes), ParallelConfig(**sizes), dtype=torch.float32)
    planned = plan.by_name[name]
    assert list(planned.reductions) == steps
    assert planned.partial == tuple(step.axis for step in steps if step.kind == "sum")
    assert f" {text}\n" in f"{plan}\n"


def test_experts_are_reduced_over_the_ranks_that_hold_the_same_ones() -> None:
    layout = ParallelConfig(ep_size=2, dp_shard_size=2, dp_replicate_size=2)
    plan = hfscale.plan(config_of("qwen3_moe"), layout, dtype=torch.float32)
    experts = plan.by_name["model.layers.0.mlp.experts.down_proj"]
    assert {step.axis for step in experts.reductions} <= {"edp_shard", "edp_replicate"}
    router = plan.by_name["model.layers.0.mlp.gate.weight"]
    assert [step.axis for step in router.reductions] == ["dp_shard", "dp_replicate"]
