"""What a rank holds is what the plan says, to the byte; what layers keep for the backward pass, within 5%."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, MixtralConfig, PreTrainedConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.finetune.memory import count_saved, held_bytes
from hfscale.runtime import runtime_of
from hfscale.testing import RankPool

from ..models import tiny

Pools = Callable[[int], RankPool]
ROWS, LENGTH = 4, 32
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
TP, SHARD, PP = {"tp_size": 2}, {"dp_shard_size": 2}, {"pp_size": 2, "num_microbatches": 2}
SEQUENCE = {**TP, "sequence_parallel": True}


def llama(**changes: Any) -> PreTrainedConfig:
    """67 tokens, 50 and 90 rows: cuts are ragged."""
    sizes = {"hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 3, "num_attention_heads": 4}
    return tiny("llama", **{**sizes, **changes})


def mixture(**changes: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 67}
    return MixtralConfig(**{**sizes, **experts, **changes})


def measured(
    source: Any,
    layout: dict[str, Any],
    optimizer: str,
    lora: dict[str, Any] | None = None,
    quantization: BitsAndBytesConfig | None = None,
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    **estimate: Any,
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Predicted bytes, those that are held after a step, and those that were saved in a step."""
    adapters = None if lora is None else LoraConfig(**lora)
    kwargs: dict[str, Any] = {"parallel": ParallelConfig(**layout), "dtype": dtype, "peft_config": adapters}
    if isinstance(source, str):
        model = hfscale.from_pretrained(source, quantization_config=quantization, **kwargs).train()
    else:
        model = hfscale.from_config(source, attn_implementation="sdpa", **kwargs).train()
    made = hfscale.create_optimizer(model, optimizer, lr=1e-4, **(options or {}))
    runtime = runtime_of(model)
    rows = ROWS // hfscale.batch_world(model)
    microbatches = layout.get("num_microbatches", 1)
    ids = torch.randint(3, 60, (rows * microbatches, LENGTH), generator=torch.Generator().manual_seed(0))
    with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    made.step()
    estimated = hfscale.memory_estimate(model, optimizer, tokens=rows * LENGTH, optim_args=options, **estimate)
    found = {"layers": saved.layers, "around": saved.around, "head": saved.head, "total": saved.total}
    return estimated.kinds, asdict(held_bytes(model, made)), found


def check(ranks: list[tuple[dict[str, int], dict[str, int], dict[str, int]]], saved: float | None = 0.05) -> None:
    for predicted, held, kept in ranks:
        assert {kind: predicted[kind] for kind in held} == held
        if saved is not None:
            assert kept["layers"] + kept["around"] == pytest.approx(predicted["activations"], rel=saved)


LAYOUTS = {"one": {}, "tp2": TP, "sequence": SEQUENCE, "shard2": SHARD, "pp2": PP}


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_8bit"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_llama(pools: Pools, layout: str, optimizer: str, lora: dict[str, Any] | None) -> None:
    sizes = LAYOUTS[layout]
    check(pools(ParallelConfig(**sizes).total_size).run(measured, llama(), sizes, optimizer, lora))
