"""Every layout equals one process: loss, every gradient, norm, weights after two steps, in float64."""

from collections.abc import Callable
from itertools import product

import pytest

from hfscale import ParallelConfig
from hfscale.testing import Case, RankPool, assert_layout_equal

from ..sweeps import pairs
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]

LAYOUTS = {
    "tp2": {"tp_size": 2},
    "shard2": {"dp_shard_size": 2},
    "replicate2": {"dp_replicate_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "tp2-replicate2": {"tp_size": 2, "dp_replicate_size": 2},
    "shard4": {"dp_shard_size": 4},
    "replicate2-shard2": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "shard2-reduced-each": {"dp_shard_size": 2, "reduce_each_microbatch": True},
    "tp2-replicate2-reduced-each": {
        "tp_size": 2,
        "dp_replicate_size": 2,
        "reduce_each_microbatch": True,
    },
}
MODELS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-padding-token": ("llama", {"pad_token_id": 0}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
}


# Data axes do not ask what a block is made of: one family for all, and fused projections where a tensor axis is cut.
_FUSED = ["tp2", "shard2", "tp2-shard2"]


@pytest.mark.daily("llama-tp2-replicate2-reduced-each", "gpt2-tp2-shard2")
@pytest.mark.parametrize(
    ("model", "layout"),
    pairs(
        ["llama", "gpt2"],
        LAYOUTS,
        daily=[*(("llama", name) for name in LAYOUTS), *(("gpt2", name) for name in _FUSED)],
    ),
)
def test_layout(pools: Pools, model: str, layout: str) -> None:
    family, changes = MODELS[model]
    parallel = ParallelConfig(**LAYOUTS[layout])
    assert_layout_equal(Case(tiny(family, **changes)), parallel, pools(parallel.total_size))


# What is tied, has biases or norms per head meets FSDP2 as well.
_SHARDED = ["llama-tied", "llama-biases", "qwen3"]
_OTHERS = [name for name in MODELS if name not in ("llama", "gpt2")]


@pytest.mark.daily("llama-padding-token-tp2", "gpt2-untied-tp2")
@pytest.mark.parametrize(
    ("model", "layout"),
    pairs(
        _OTHERS,
        ["tp2", "tp2-shard2"],
        daily=[(name, "tp2-shard2" if name in _SHARDED else "tp2") for name in _OTHERS],
    ),
)
def test_family(pools: Pools, model: str, layout: str) -> None:
    family, changes = MODELS[model]
    parallel = ParallelConfig(**LAYOUTS[layout])
    assert_layout_equal(Case(tiny(family, **changes)), parallel, pools(parallel.total_size))


@pytest.mark.daily("llama-tied", "gpt2", "qwen3", "llama-padding-token")
@pytest.mark.parametrize("model", list(MODELS))
def test_one_process(model: str) -> None:
    family, changes = MODELS[model]
    assert_layout_equal(Case(tiny(family, **changes)), ParallelConfig(), None)


_BUILDS = ["from_pretrained", "parallelize"]


@pytest.mark.daily("gpt2-parallelize-tp2")
@pytest.mark.parametrize(
    ("model_build", "layout"),
    pairs(
        list(product(["llama-tied", "gpt2"], _BUILDS)),
        ["tp2", "tp2-shard2", "replicate2"],
        daily=[
            *(
                (("llama-tied", build), layout)
                for build in _BUILDS
                for layout in ("tp2", "replicate2")
            ),
            *((("gpt2", build), "tp2") for build in _BUILDS),
            (("llama-tied", "parallelize"), "tp2-shard2"),
            (("gpt2", "from_pretrained"), "tp2-shard2"),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_checkpointing_and_frozen(pools: Pools, model_build: tuple[str, str], layout: str) -> None:
    model, build = model_build
    family, changes = MODELS[model]
    parallel = ParallelConfig(**LAYOUTS[layout])
    frozen = ("layers.0.", "k_proj") if family == "llama" else ("h.0.", "c_proj.bias")
    case = Case(
        tiny(family, **changes), checkpointing=True, frozen=frozen, build=build, accumulation=3
    )
    assert_layout_equal(case, parallel, pools(parallel.total_size))


@pytest.mark.daily("sdpa")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(pools: Pools, attention: str) -> None:
    case = Case(tiny("gpt2"), hf_kwargs={"attn_implementation": attention})
    assert_layout_equal(case, ParallelConfig(tp_size=2), pools(2))


@pytest.mark.slow
def test_tp4_with_uneven_shares(pools: Pools) -> None:
    # 67 tokens over 4 ranks are 17, 17, 17, 16 and 50 MLP columns 13, 13, 13, 11
    case = Case(tiny("llama", num_key_value_heads=4, mlp_bias=True))
    assert_layout_equal(case, ParallelConfig(tp_size=4), pools(4))
