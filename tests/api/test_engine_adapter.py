"""An adapter of stacked experts, rewritten for engines, changes every stored weight as PEFT does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import HRAConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig

import hfscale
from hfscale.cli import main
from hfscale.testing.parity import stored

from ..mixtures import gpt_oss, qwen3_moe
from ..tiny_models import tiny

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def mixtral() -> PreTrainedConfig:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 10,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
    }
    return MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=67)


def saved(directory: Path, config: Any, **given: Any) -> float:
    """Write a base, an adapter, and what PEFT merges; return the adapter's scale."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.save_pretrained(directory / "base")
    lora = LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, task_type="CAUSAL_LM", **given)
    adapted = get_peft_model(model, lora).double()
    adapted.save_pretrained(directory / "adapter")
    adapted.merge_and_unload().save_pretrained(directory / "merged")
    return 5 / 3


@pytest.mark.parametrize("make", [qwen3_moe, mixtral])
@pytest.mark.parametrize("adapted", [BOTH, BOTH[:1]], ids=["both", "one"])
def test_factors_of_each_expert(
    tmp_path: Path, make: Any, adapted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines want factors for all projections of an expert: those without an adapter get zeros."""
    scale = saved(tmp_path, make(), target_modules=["q_proj"], target_parameters=adapted)
    places = [str(tmp_path / name) for name in ("adapter", "out", "base")]
    assert main(["convert", *places[:2], "--adapter-for", "vllm", "--base", places[2]]) == 0
    assert "for vllm" in capsys.readouterr().out
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    before = stored(tmp_path / "base")
    merged = stored(tmp_path / "merged")
    changed = 0
    for key, weight in before.items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        a, b = (found.pop(f"{module}.lora_{factor}.weight", None) for factor in "AB")
        change = (
            torch.zeros_like(weight) if a is None or b is None else scale * b.double() @ a.double()
        )
        torch.testing.assert_close(merged[key], weight + change, rtol=1e-6, atol=1e-6)
        changed += a is not None
    assert not found
    experts = sum(".experts." in key for key in before)
    assert changed == experts + make().num_hidden_layers
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    leaves = {key.split(".")[-2] for key in before if ".experts." in key}
    assert set(settings["target_modules"]) == {"q_proj", *leaves}
    assert settings["target_parameters"] is None


def test_stacked_as_stored_and_without_experts_stay_as_they_are(tmp_path: Path) -> None:
    for name, config, given in (
        ("stacked", gpt_oss(), {"target_modules": [], "target_parameters": BOTH}),
        ("dense", tiny("llama"), {"target_modules": ["q_proj"]}),
    ):
        saved(tmp_path / name, config, **given)
        places = [str(tmp_path / name / each) for each in ("adapter", "out", "base")]
        assert main(["convert", *places[:2], "--adapter-for", "sglang", "--base", places[2]]) == 0
        files = [load_file(Path(each) / "adapter_model.safetensors") for each in places[:2]]
        assert files[0].keys() == files[1].keys()
        assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])


REFUSED: dict[str, tuple[Any, int, str]] = {
    "copies": (
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        67,
        "got .*lm_head.weight, a weight of the model itself: merge",
    ),
    "a resized vocabulary": (
        LoraConfig(r=2, target_modules=["q_proj"]),
        70,
        "and a vocabulary of 70 tokens: merge",
    ),
    "trained biases": (
        LoraConfig(r=2, target_modules=["q_proj"], bias="lora_only"),
        67,
        "got .*q_proj.*bias, a weight of the model itself: merge",
    ),
    "DoRA": (LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), 67, "got DoRA: merge"),
    "another method": (HRAConfig(r=2, target_modules=["q_proj"]), 67, "got HRA: merge"),
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_engines_do_not_add_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such an adapter is merged, or the file would be refused by the engine, or served in part."""
    config, tokens, words = REFUSED[kind]
    config.task_type = "CAUSAL_LM"
    base = AutoModelForCausalLM.from_config(tiny("llama", vocab_size=67, attention_bias=True))
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if tokens != 67:
        base.resize_token_embeddings(tokens, mean_resizing=False)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    places = [str(tmp_path / name) for name in ("adapter", "out", "base")]
    assert main(["convert", *places[:2], "--adapter-for", "vllm", "--base", places[2]]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert main(["merge", places[2], places[0], str(tmp_path / "merged")]) == 0


def test_it_needs_the_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--adapter-for", "vllm"]) == 2
    assert "--base" in capsys.readouterr().err


def test_saving_says_what_engines_ignore(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, config, targets, said in (
        ("apart", qwen3_moe(), BOTH, True), ("stacked", gpt_oss(), BOTH, False), ("dense", tiny("llama"), None, False)
    ):  # fmt: skip
        caplog.clear()
        lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)
        model = hfscale.from_config(config, peft_config=lora)
        hfscale.save_pretrained(model, tmp_path / name)
        assert ("vLLM and SGLang ignore them" in caplog.text) == said, name
