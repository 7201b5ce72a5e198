"""The first training step says what would go on without a word."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import hfscale
from hfscale._compat.bitsandbytes import misreads_rows

from ...tiny_models import tiny

IDS = torch.arange(12).repeat(2, 1)
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def _lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj"])


@pytest.mark.parametrize(
    ("kwargs", "lost"),
    [
        ({"dtype": torch.bfloat16}, True),
        ({"dtype": torch.float32, "mixed_precision": "bf16"}, False),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.bfloat16, "peft_config": _lora()}, False),
    ],
)
def test_updates_that_would_be_rounded_away(
    caplog: pytest.LogCaptureFixture, kwargs: dict[str, Any], lost: bool
) -> None:
    model = hfscale.from_config(tiny("llama"), **kwargs)
    with caplog.at_level(logging.WARNING, "hfscale"):
        hfscale.train_step(model, BATCH)
        hfscale.train_step(model, BATCH)
    said = [
        record.getMessage() for record in caplog.records if "rounded away" in record.getMessage()
    ]
    assert len(said) == lost  # once
    if lost:
        assert (
            "21 of the 21 parameters that train are bfloat16 (model.embed_tokens.weight, for one)"
            in said[0]
        )
        assert 'dtype=torch.float32, mixed_precision="bf16"' in said[0]


@pytest.mark.parametrize(("asked", "own"), [("bf16", "no"), ("bf16", "bf16"), ("no", "bf16")])
def test_a_precision_that_only_the_launcher_was_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, asked: str, own: str
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    model = hfscale.from_config(tiny("llama"), dtype=torch.float32, mixed_precision=own)
    with caplog.at_level(logging.WARNING, "hfscale"):
        hfscale.train_step(model, BATCH)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == ((asked, own) == ("bf16", "no"))
    assert all("build it with mixed_precision='bf16'" in text for text in said)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_base_in_4_bits_alone(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, frozen: bool
) -> None:
    width = 96 if frozen else 128
    AutoModelForCausalLM.from_config(
        tiny("llama", hidden_size=64, intermediate_size=width)
    ).save_pretrained(tmp_path)
    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = hfscale.from_pretrained(tmp_path, quantization_config=four, dtype=torch.float32).train()
    if frozen:  # who freezes has chosen
        model.get_input_embeddings().requires_grad_(False)
    with caplog.at_level(logging.WARNING, "hfscale"):
        hfscale.train_step(model, BATCH)
    misread = [
        record.getMessage() for record in caplog.records if "wrong scales" in record.getMessage()
    ]
    assert len(misread) == misreads_rows(width)
    assert all("whole blocks of 64 values (96 here)" in text for text in misread)
    said = [
        record.getMessage() for record in caplog.records if "has no adapters" in record.getMessage()
    ]
    assert len(said) == (not frozen)
    if said:
        assert "held in 4 bits, which do not train" in said[0]
        assert "model.embed_tokens.weight, for one" in said[0]
        assert "peft_config=LoraConfig(...)" in said[0]
