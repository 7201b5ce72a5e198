"""An adapter merged into its base on disk is what stock PEFT merges in memory, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hfscale.cli import main

from ...mixtures import qwen3_moe
from ...tiny_models import tiny

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (lambda: tiny("llama"), {"target_modules": "all-linear"}),
    "dora": (lambda: tiny("llama"), {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "transposed": (lambda: tiny("gpt2"), {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "copy": (
        lambda: tiny("llama", tie_word_embeddings=False),
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    ),
    "mixture": (qwen3_moe, {"target_modules": ["q_proj", "o_proj"]}),
    "experts": (qwen3_moe, {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_merged(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, options = KINDS[kind]
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(make(), dtype=torch.float32)
    base.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    adapted = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected")
    assert main(["merge", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]) == 0
    out = capsys.readouterr().out
    assert "tensors have the adapter in them" in out
    assert float(out.partition("differ by ")[2].split()[0]) < 1e-5
    expected, found = ({}, {})
    for name, into in (("expected", expected), ("out", found)):
        for file in (tmp_path / name).glob("*.safetensors"):
            into.update(load_file(file))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_what_is_there_stays_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    places = [str(tmp_path / name) for name in ("base", "adapter", "out")]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")  # which stock transformers would load on top
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert main(["merge", *places, "--no-check"]) == 2
    said = capsys.readouterr().err
    assert "out has files already (adapter_config.json, notes.txt): name another directory, or replace them" in said
    assert main(["merge", *places, "--no-check", "--overwrite"]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "notes.txt"} <= names
    assert "adapter_config.json" not in names
    for read in places[:2]:
        assert main(["merge", *places[:2], read, "--overwrite"]) == 2
        assert ", which is read: name another" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["merge", *places[:2], str(tmp_path / "file"), "--overwrite"]) == 2
    assert "is a file: name a directory" in capsys.readouterr().err
