"""More tensor ranks than key/value heads: several ranks hold the same head, and train it as one process does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.models.clone import tiny_clone
from hfscale.testing import Case, RankPool, assert_layout_equal
from hfscale.train.runtime import runtime_of

from ..families import config_of
from ..sweeps import cases
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
TP2 = {"tp_size": 2}
TP4 = {"tp_size": 4}
SHARDED = {"tp_size": 2, "dp_shard_size": 2}
BIASES = {"attention_bias": True, "mlp_bias": True}


def clone(family: str, **changes: Any) -> PreTrainedConfig:
    return tiny_clone(AutoConfig.for_model(family), **{"pad_token_id": None, **changes})


CASES: dict[str, tuple[PreTrainedConfig, dict[str, int]]] = {
    "llama-1-tp2": (tiny("llama", num_key_value_heads=1, tie_word_embeddings=True, **BIASES), TP2),
    "llama-2-tp4": (tiny("llama", num_key_value_heads=2, **BIASES), TP4),
    "llama-2-tp4-sequence": (
        tiny("llama", num_key_value_heads=2, **BIASES),
        {**TP4, "sequence_parallel": True},
    ),
    "llama-1-tp4": (tiny("llama", num_key_value_heads=1), TP4),
    "llama-1-tp2-shard2": (tiny("llama", num_key_value_heads=1, **BIASES), SHARDED),
    "qwen3-1-tp2": (tiny("qwen3", num_key_value_heads=1), TP2),
    "olmo2-2-tp4": (
        clone("olmo2", num_key_value_heads=2),
        TP4,
    ),  # norms across all heads, those of the keys copied
    "doge-1-tp2": (
        clone("doge", num_key_value_heads=1),
        TP2,
    ),  # parameters per key/value head besides projections
    # The last layer makes no keys, and reads those of the layer before.
    "gemma3n-1-tp2": (config_of("gemma3n_text", num_key_value_heads=1), TP2),
    "stablelm-1-tp2": (clone("stablelm", num_key_value_heads=1), TP2),
    "phi3-1-tp2": (clone("phi3", num_key_value_heads=1), TP2),
    "phi3-2-tp4": (clone("phi3", num_key_value_heads=2), TP4),
    "phi3-1-tp2-shard2": (clone("phi3", num_key_value_heads=1), SHARDED),
    # as configured by default: one key/value head for all
    "gpt_bigcode-tp2": (clone("gpt_bigcode"), TP2),
    "gpt_bigcode-tp2-shard2": (clone("gpt_bigcode"), SHARDED),
    "falcon-tp2": (clone("falcon"), TP2),
    "recurrent_gemma-tp2": (clone("recurrent_gemma", num_hidden_layers=3), TP2),
    # ... and with a key and a value beside the queries that read them, which are never copied
    "gpt_bigcode-heads-tp2": (clone("gpt_bigcode", multi_query=False, num_key_value_heads=4), TP2),
    "falcon-groups-tp2": (clone("falcon", new_decoder_architecture=True, num_kv_heads=2), TP2),
}


RARE = (
    "llama-1-tp4",
    "qwen3-1-tp2",
    "stablelm-1-tp2",
    "phi3-1-tp2",
    "phi3-1-tp2-shard2",
    "gpt_bigcode-tp2-shard2",
)


@pytest.mark.daily("llama-2-tp4-sequence", "gpt_bigcode-heads-tp2", "falcon-groups-tp2")
@pytest.mark.parametrize("case", cases(CASES, daily=[case for case in CASES if case not in RARE]))
def test_layout(pools: Pools, case: str) -> None:
    config, sizes = CASES[case]
    parallel = ParallelConfig(**sizes)
    assert_layout_equal(Case(config), parallel, pools(parallel.total_size))


@pytest.mark.daily("eager")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(pools: Pools, attention: str) -> None:
    case = Case(
        tiny("llama", num_key_value_heads=1),
        hf_kwargs={"attn_implementation": attention},
        checkpointing=True,
    )
    assert_layout_equal(case, ParallelConfig(tp_size=2), pools(2))


def test_frozen_projections_stay_frozen(pools: Pools) -> None:
    case = Case(tiny("llama", num_key_value_heads=1), frozen=("k_proj", "layers.0."))
    assert_layout_equal(case, ParallelConfig(tp_size=2), pools(2))


def _train(config: PreTrainedConfig, layout: ParallelConfig) -> dict[str, list[torch.Tensor]]:
    """The shares of every parameter with copies: as made, and after two steps of AdamW in float32."""
    model = hfscale.from_config(config, parallel=layout, seed=3)
    runtime = runtime_of(model)
    held = {
        planned.name: parameter
        for planned, parameter in runtime.parameters()
        if planned.replicas > 1
    }
    made = {name: parameter.detach().clone() for name, parameter in held.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        ids = torch.randint(0, config.vocab_size, (2, 16), generator=generator)
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        hfscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: [made[name], parameter.detach().clone()] for name, parameter in held.items()}


@pytest.mark.daily("phi3-2-tp4")
@pytest.mark.parametrize("case", ["llama-2-tp4", "phi3-2-tp4"])
def test_copies_start_and_stay_equal_to_the_last_bit(pools: Pools, case: str) -> None:
    config, sizes = CASES[case]
    layout = ParallelConfig(**sizes)
    planned = hfscale.plan(config, layout)
    ranks = pools(layout.total_size).run(_train, config, layout)
    assert len(ranks[0]) == (8 if case.startswith("llama") else 2)  # of two layers
    for name in ranks[0]:
        cut = planned.by_name[name].cut_over("tp")
        assert cut is not None
        length = planned.by_name[name].shape[cut.dim]

        def copied(
            rank: int, when: int, name: str = name, cut: Any = cut, length: int = length
        ) -> torch.Tensor:
            spans = cut.local_spans(length, rank, lambda replicas: replicas > 1)
            return torch.cat([ranks[rank][name][when].narrow(cut.dim, a, b - a) for a, b in spans])

        for when in range(2):
            assert torch.equal(copied(0, when), copied(1, when))
            assert torch.equal(copied(2, when), copied(3, when))
            assert not torch.equal(copied(0, when), copied(2, when)) or (
                name.endswith("bias") and when == 0
            )
        assert not torch.equal(copied(0, 0), copied(0, 1))
