"""Weights in 4 bits are dequantized once for a recomputed pass and the backward pass behind it, to the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

import hfscale
from hfscale import MemoryConfig
from hfscale._compat.bitsandbytes import multiplies_values
from hfscale._compat.torch import operator_name
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.features.quantization import repeated_linears, sharded_linears
from hfscale.testing import RankPool
from hfscale.train.runtime import local_tensor, runtime_of

from .models import Layout, four_bits, load, save, tokens, wide

Pools = Callable[[int], RankPool]
WEIGHTS = 2 * 7
OF_THE_FIRST = 3  # projections that read the first layer's input


class Dequantizations(TorchDispatchMode):
    """Count how often a weight is dequantized, within products too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator_name(func) in ("dequantize_4bit", "gemm_4bit")
        return func(*args, **(kwargs or {}))


def passes(
    path: str, layout: Layout, dtype: torch.dtype, by: str, shared: bool, double: bool
) -> tuple[list[torch.Tensor], int]:
    """Losses and gradients of three steps, and how often each weight is dequantized in one."""
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    memory = MemoryConfig(recompute="full" if by == "hfscale" else "none")
    config = four_bits(double=double, bnb_4bit_compute_dtype=dtype)
    torch.manual_seed(0)
    model = load(path, layout, config, peft_config=adapter, memory=memory, dtype=dtype).train()
    if by == "transformers":
        enable_checkpointing(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    answer = multiplies_values if shared else lambda x: False
    with (
        patch.object(repeated_linears, "multiplies_values", answer),
        patch.object(sharded_linears, "multiplies_values", answer),
    ):
        for step in range(3):
            ids = tokens()[:, : 12 - step]
            optimizer.zero_grad()
            with Dequantizations() as seen:
                found.append(hfscale.train_step(model, {"input_ids": ids, "labels": ids}))
            found += [
                local_tensor(x.grad)
                for _, x in runtime_of(model).parameters()
                if x.grad is not None
            ]
            optimizer.step()
    return found, seen.count


def compare(results: list[list[tuple[list[torch.Tensor], int]]], plainly: int) -> None:
    for shared, plain in zip(*results, strict=True):
        assert len(shared[0]) == len(plain[0]) > 3
        for found, wanted in zip(shared[0], plain[0], strict=True):
            assert torch.equal(found, wanted)
        assert plain[1] == plainly
        assert shared[1] == 2 * WEIGHTS


@pytest.mark.parametrize("by", ["hfscale", "transformers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_shared_with_the_backward_pass(
    tmp_path: Path, dtype: torch.dtype, by: str
) -> None:
    path = save(wide("llama"), tmp_path, dtype)
    results = [[passes(path, {}, dtype, by, how, True)] for how in (True, False)]
    # Nobody asks for the gradient of the first layer's input, unless it is made to have one.
    compare(results, 3 * WEIGHTS - (OF_THE_FIRST if by == "hfscale" else 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_shards_are_shared_too(pools: Pools, tmp_path: Path, dtype: torch.dtype) -> None:
    path = save(wide("llama"), tmp_path, dtype)
    layout = {"dp_shard_size": 2}
    results = [
        pools(2).run(passes, path, layout, dtype, "hfscale", how, False) for how in (True, False)
    ]
    compare(results, 3 * WEIGHTS - OF_THE_FIRST)


def test_layers_that_are_not_recomputed_keep_no_values(tmp_path: Path) -> None:
    path = save(wide("llama"), tmp_path)
    (_, count) = passes(path, {}, torch.float32, "none", True, False)
    assert count == 2 * WEIGHTS - OF_THE_FIRST


def test_a_bias_that_trains_has_its_own_dtype(tmp_path: Path) -> None:
    path = save(wide("llama", attention_bias=True, mlp_bias=True), tmp_path)
    gradients = []
    for how in ("none", "full"):
        torch.manual_seed(0)
        memory = MemoryConfig(recompute=how)
        config = four_bits(bnb_4bit_compute_dtype=torch.float32)
        model = load(path, {}, config, memory=memory, mixed_precision="bf16").train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and name.endswith("bias"))
        ids = tokens()
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    plain, checkpointed = gradients
    assert len(plain) == WEIGHTS
    for name, gradient in plain.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(checkpointed[name], gradient), name
