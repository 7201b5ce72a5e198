"""Experts in 4 bits: each matrix is quantized by itself, and stock experts on what is dequantized compute the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor
from transformers import (
    BitsAndBytesConfig,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

import hfscale
from hfscale import ParallelConfig
from hfscale.features.quantization.quantized_modules import dequantized, is_quantized
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...tensor_memory import follow_memory
from .models import Layout, four_bits, load, save, stock, tokens

Pools = Callable[[int], RankPool]

LAYOUTS: dict[str, Layout] = {
    "one": {},
    "ep2": {"ep_size": 2, "tp_size": 2},
    "ep2-shard2": {"ep_size": 2, "dp_shard_size": 2},
    "ep2-shard4": {"ep_size": 2, "dp_shard_size": 4},
    "ep2-replicate2": {"ep_size": 2, "dp_replicate_size": 2},
    "tp2": {"tp_size": 2},
    "sp2": {"tp_size": 2, "sequence_parallel": True},
    "shard2": {"dp_shard_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
}


def mixture(family: str) -> PreTrainedConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "vocab_size": 67,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "qwen3_moe":
        return Qwen3MoeConfig(
            **sizes, num_experts=4, moe_intermediate_size=128, intermediate_size=128
        )
    if family == "mixtral":
        return MixtralConfig(**sizes, num_local_experts=4, intermediate_size=128)
    return GptOssConfig(**sizes, num_local_experts=4, intermediate_size=128, pad_token_id=0)


def reference(path: str, config: BitsAndBytesConfig) -> Any:
    """The stock model; its experts hold what bitsandbytes makes of each matrix."""
    model = stock(path, config).train()
    for module in model.modules():
        for name in ("gate_up_proj", "down_proj") if hasattr(module, "num_experts") else ():
            parameter = getattr(module, name, None)
            if not isinstance(parameter, Tensor) or parameter.ndim != 3:
                continue
            for matrix in parameter.data:
                packed, state = bnb.functional.quantize_4bit(
                    matrix.contiguous(),
                    blocksize=64,
                    compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                )
                matrix.copy_(bnb.functional.dequantize_4bit(packed, state))
            parameter.requires_grad_(False)
    return model


Found = tuple[
    float, dict[str, tuple[Tensor, dict[str, int]]], dict[str, tuple[Tensor, dict[str, int]]]
]


def step_of(path: str, layout: Layout, config: BitsAndBytesConfig) -> Found:
    """Loss; gradients; weights of experts, dequantized; each with where it belongs."""
    model = load(path, layout, config).train()
    ids = tokens(4)[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    runtime = runtime_of(model)
    ranks = runtime.mesh.ranks
    grads = {
        planned.name: (local_tensor(parameter.grad).clone(), ranks)
        for planned, parameter in runtime.parameters()
        if parameter.grad is not None
    }
    weights = {}
    for each in filter(lambda each: runtime.is_local(each.name), runtime.plan.mixtures):
        module = model.get_submodule(each.name)
        for name in ("gate_up_proj", "down_proj"):
            assert is_quantized(module, name)
            weights[f"{each.name}.{name}"] = dequantized(module, name), ranks
    return float(loss), grads, weights


@pytest.mark.daily("qwen3_moe-ep2-shard4", "gpt_oss-sp2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_those_of_one_process(
    pools: Pools, tmp_path: Path, family: str, layout: str
) -> None:
    config = mixture(family)
    sizes = LAYOUTS[layout]
    path = save(config, tmp_path)
    model = reference(path, four_bits())
    loss = model(input_ids=tokens(4), labels=tokens(4)).loss
    loss.backward()
    parallel = ParallelConfig(**sizes)
    plan = hfscale.plan(config, parallel, quantization_config=four_bits())
    assert plan.quantized is not None
    parameters = dict(model.named_parameters())
    if parallel.total_size == 1:
        every = [step_of(path, sizes, four_bits())]
    else:
        every = pools(parallel.total_size).run(step_of, path, sizes, four_bits())
    for ours, grads, weights in every:
        assert ours == pytest.approx(loss.item(), rel=1e-5)
        assert len(weights) == (2 if "pp" in layout else 4)
        for name, (weight, ranks) in weights.items():
            assert plan.quantized.aligned(plan.by_name[name])
            assert torch.equal(
                weight, plan.by_name[name].take(parameters[name].data, ranks, axes=("ep", "tp"))
            ), name
        for name, (grad, ranks) in grads.items():
            whole = parameters[name].grad
            assert whole is not None
            assert (
                grad - plan.by_name[name].take(whole, ranks)
            ).norm() <= 2e-4 * whole.norm() + 1e-8, name


def test_double_quantization_is_by_matrix_too(tmp_path: Path) -> None:
    path = save(mixture("mixtral"), tmp_path)
    config = four_bits("fp4", double=True)
    model = reference(path, config)
    loss = model(input_ids=tokens(4), labels=tokens(4)).loss
    ours, _, weights = step_of(path, {}, config)
    assert ours == pytest.approx(loss.item(), rel=1e-5)
    for name, (weight, _) in weights.items():
        assert torch.equal(weight, model.get_parameter(name))


def kept(path: str) -> None:
    config = four_bits(llm_int8_skip_modules=["lm_head", "experts"])
    model = load(path, {"tp_size": 2}, config)
    module = model.model.layers[0].mlp.experts
    assert module.gate_up_proj.dtype == torch.float32
    assert not is_quantized(module, "gate_up_proj")
    assert type(module).forward is module.forward.__func__  # the host's own


def test_experts_can_be_skipped(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(kept, save(mixture("qwen3_moe"), tmp_path))


def held(path: str, layout: Layout) -> tuple[int, int]:
    """Most bytes alive while loading, and those of this rank's experts afterwards."""
    with follow_memory() as memory:
        model = load(path, layout, four_bits(), dtype=torch.bfloat16)
    modules = [model.get_submodule(each.name) for each in runtime_of(model).plan.mixtures]
    parameters = [local_tensor(p.detach()) for module in modules for p in module.parameters()]
    return memory.peak, sum(p.numel() * p.element_size() for p in parameters)


@pytest.mark.daily("ep2-shard4", "shard2")
@pytest.mark.parametrize("layout", ["ep2", "shard2", "ep2-shard4"])
def test_ranks_quantize_their_own_experts_only(pools: Pools, tmp_path: Path, layout: str) -> None:
    sizes = LAYOUTS[layout]
    ranks = ParallelConfig(**sizes).total_size
    path = save(mixture("qwen3_moe"), tmp_path, torch.bfloat16)
    numbers = 2 * 4 * 3 * 128 * 128
    for peak, experts in pools(ranks).run(held, path, sizes):
        # Packed bytes and scales.
        assert experts == numbers // ranks // 2 + numbers // ranks // 64 * 4
        largest = 4 * 2 * 128 * 128 * 2 // ranks  # gate_up_proj of a layer, this rank's share
        # Read, stacked, joined, beside all that is not experts (and quantized).
        assert peak <= 3 * largest + 200_000
        assert peak < 2 * numbers  # 16 bits


def saved_for_backward(path: str) -> int:
    """The most numbers in one tensor that autograd keeps from a mixture."""
    model = load(path, {}, four_bits()).train()
    experts = model.model.layers[0].mlp.experts
    sizes = []
    x = torch.randn(6, 128, requires_grad=True)
    index = torch.tensor([[0, 1]] * 6)
    weights = torch.full((6, 2), 0.5)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        experts(x, index, weights).sum().backward()
    return max(sizes)


def test_no_dequantized_weight_is_kept(tmp_path: Path) -> None:
    assert saved_for_backward(save(mixture("qwen3_moe"), tmp_path)) <= 12 * 2 * 128
