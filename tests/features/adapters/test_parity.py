"""Adapters over every layout equal stock PEFT in one process: loss, every gradient, norm, weights, saved adapter."""

from collections.abc import Callable
from typing import Any

import pytest
from peft import IA3Config, LoHaConfig, LoraConfig
from transformers import Phi3Config

from hfscale import ParallelConfig
from hfscale.testing import Case, RankPool, assert_layout_equal

from ...sweeps import cases, pairs
from ...tiny_models import tiny

# What PEFT says of its own saving and of ties.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Adapter .default.. .* invalid shape"),
]

Pools = Callable[[int], RankPool]

LAYOUTS = {
    "one": {},
    "tp2": {"tp_size": 2},
    "sp2": {"tp_size": 2, "sequence_parallel": True},
    "tp4": {"tp_size": 4},
    "shard2": {"dp_shard_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "tp2-pp2": {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
}


ROUGH = ["one", "tp2", "sp2", "tp2-shard2"]
KINDS = {
    "dora": ("llama", {"use_dora": True}),
    "dora-biases": ("llama-biases", {"use_dora": True}),
    "rslora": ("llama", {"use_rslora": True}),
    "bias": ("llama-biases", {"bias": "all"}),
    "lora-bias": ("llama-biases", {"lora_bias": True}),
    "head": ("llama", {"target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "o_proj"]}),
    "tied-embedding": ("llama-tied", {"target_modules": ["embed_tokens", "o_proj"]}),
    "padding-embedding": ("llama-padding", {"target_modules": ["embed_tokens", "o_proj"]}),
    "copies": ("llama", {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "copied-row": (
        "llama-biases",
        {"target_modules": ["q_proj"], "modules_to_save": ["o_proj", "up_proj"]},
    ),
    "rows-only": ("llama", {"target_modules": ["o_proj"]}),
    "one-layer": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "ranks": ("llama", {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 3}}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "conv1d-dora": (
        "gpt2",
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    "norms-per-head": ("qwen3", {}),
}
FAMILIES = {
    "llama": lambda: tiny("llama"),
    "llama-tied": lambda: tiny("llama", tie_word_embeddings=True),
    "llama-padding": lambda: tiny("llama", pad_token_id=0),
    "llama-biases": lambda: tiny("llama", attention_bias=True, mlp_bias=True),
    "gpt2": lambda: tiny("gpt2"),
    "qwen3": lambda: tiny("qwen3"),
    "phi3": lambda: Phi3Config(
        hidden_size=32, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=67, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    ),
}  # fmt: skip


def _lora(**changes: object) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    )


@pytest.mark.daily("pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora_on_all_linear(pools: Pools, layout: str) -> None:
    _check(pools, Case(tiny("llama"), peft=_lora()), layout)


def _rough() -> list[Any]:
    """Every kind over tensor ranks; in the other layouts those most unlike plain LoRA."""
    often = {"dora-biases", "copies"}
    return pairs(
        KINDS, ROUGH, daily=[(k, at) for k in KINDS for at in ROUGH if at == "tp2" or k in often]
    )


@pytest.mark.daily(
    "ranks-tp2",
    "conv1d-dora-tp2",
    "head-tp2",
    "lora-bias-tp2",
    "copied-row-tp2",
    "tied-embedding-tp2",
)
@pytest.mark.parametrize(("kind", "layout"), _rough())
def test_kinds_of_lora(pools: Pools, kind: str, layout: str) -> None:
    family, changes = KINDS[kind]
    _check(pools, Case(FAMILIES[family](), peft=_lora(**changes)), layout)


@pytest.mark.daily("sp2")
@pytest.mark.parametrize("layout", cases(ROUGH, daily=["sp2", "tp2-shard2"]))
def test_other_methods(pools: Pools, layout: str) -> None:
    targets = {
        "target_modules": ["k_proj", "v_proj", "o_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
    }
    ia3 = IA3Config(**targets, feedforward_modules=["down_proj"])
    _check(pools, Case(tiny("llama"), peft=ia3), layout)
    _check(pools, Case(tiny("llama", attention_bias=True), peft=LoHaConfig(**targets, r=3)), layout)


@pytest.mark.daily("pp2")
@pytest.mark.parametrize(
    "layout", cases([*ROUGH, "pp2"], daily=["one", "sp2", "tp2-shard2", "pp2"])
)
def test_adapters_around_a_model_that_computes_already(pools: Pools, layout: str) -> None:
    # One layout around a model from memory, the others around one from a checkpoint.
    build = {"build": "parallelize"} if layout == "tp2-shard2" else {"peft_build": "get_peft_model"}
    _check(pools, Case(tiny("llama"), peft=_lora(modules_to_save=["lm_head"]), **build), layout)


def _check(pools: Pools, case: Case, layout: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    pool = pools(parallel.total_size) if parallel.total_size > 1 else None
    assert_layout_equal(case, parallel, pool)
