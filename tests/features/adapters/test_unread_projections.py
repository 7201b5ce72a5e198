"""Adapters of projections whose weights a layer reads without calling them: no gradient, and a warning that says so."""

import pytest
import torch
from peft import LoraConfig
from transformers import JambaConfig

import hfscale


def test_what_no_forward_pass_reads_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config = JambaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=67,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
        pad_token_id=0,
    )
    everything = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = hfscale.from_config(config, peft_config=everything, seed=0)
    ids = torch.arange(1, 9)[None]
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    silent = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert {name.rpartition(".lora_")[0] for name in silent} == {"model.layers.0.mamba.dt_proj"}
    assert "adapters of model.layers.*.mamba.dt_proj are never trained" in caplog.text

    caplog.clear()
    others = LoraConfig(r=2, target_modules="all-linear", exclude_modules=["dt_proj"])
    hfscale.from_config(config, peft_config=others, seed=0)
    assert not caplog.text
