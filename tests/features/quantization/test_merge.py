"""Adapters over a quantized base, merged into weights of 16 or 32 bits: what stock PEFT merges into the same values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import hfscale
from hfscale import ConfigError
from hfscale.testing import RankPool

from ...mixtures import qwen3_moe
from .models import Layout, four_bits, load, save, wide

Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "one": (1, {}),
    "tp2": (2, {"tp_size": 2}),
    "shard2": (2, {"dp_shard_size": 2}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 2}),
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _rounded(weight: Tensor) -> Tensor:
    """What is left of a matrix in 4 bits."""
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    return functional.dequantize_4bit(packed, state)


def _base(config: Any, path: Path) -> Any:
    """The stock model with the values that its layers' matrices have in 4 bits."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.ndim == 2 and "mlp.gate." not in name:
                parameter.copy_(_rounded(parameter))
            elif parameter.ndim == 3:
                parameter.copy_(torch.stack([_rounded(matrix) for matrix in parameter]))
    return model


def _adapter(config: Any, lora: LoraConfig, directory: Path) -> tuple[str, str, dict[str, Tensor]]:
    """A checkpoint, an adapter of it with random factors, and what stock PEFT merges of both."""
    start = save(config, directory / "start")
    adapter = str(directory / "adapter")
    model = get_peft_model(_base(config, directory / "start"), lora)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(adapter)
    merged = PeftModel.from_pretrained(
        _base(config, directory / "start"), adapter
    ).merge_and_unload()
    return start, adapter, merged.state_dict()


def _merge(start: str, adapter: str, out: str, layout: Layout, config: BitsAndBytesConfig) -> None:
    model = load(start, layout, config, peft_config=adapter)
    with pytest.raises(ConfigError, match=r"pass dtype=torch.bfloat16"):
        hfscale.merge_and_unload(model)
    merged = hfscale.merge_and_unload(model, dtype=torch.float32)
    assert not [name for name, module in merged.named_modules() if "4bit" in type(module).__name__]
    ids = torch.arange(12).reshape(2, 6)
    hfscale.eval_step(merged, [{"input_ids": ids, "labels": ids}] * 2)
    hfscale.save_pretrained(merged, out)


def _check(found: Path, expected: dict[str, Tensor]) -> None:
    merged = AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32)
    assert getattr(merged.config, "quantization_config", None) is None
    state = merged.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.daily("llama-shard2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged(pools: Pools, tmp_path: Path, family: str, layout: str) -> None:
    size, sizes = LAYOUTS[layout]
    dora = family == "llama" and layout != "shard2"  # which refuses it
    targets: Any = "all-linear" if family == "llama" else ["c_attn", "c_proj"]
    lora = LoraConfig(
        r=4,
        target_modules=targets,
        use_dora=dora,
        fan_in_fan_out=family == "gpt2",
        task_type="CAUSAL_LM",
    )
    if family == "gpt2":
        config = wide("gpt2")
        start = save(config, tmp_path / "start")
        adapter = ""
        expected = {}
        base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in base.named_parameters():
                if ".h." in name and parameter.ndim == 2:
                    parameter.copy_(_rounded(parameter.T.contiguous()).T)
        model = get_peft_model(base, lora)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        adapter = str(tmp_path / "adapter")
        model.save_pretrained(adapter)
        expected = model.merge_and_unload().state_dict()
    else:
        start, adapter, expected = _adapter(wide("llama"), lora, tmp_path)
    arguments = (start, adapter, str(tmp_path / "merged"), sizes, four_bits())
    _merge(*arguments) if size == 1 else pools(size).run(_merge, *arguments)
    _check(tmp_path / "merged", expected)


@pytest.mark.daily("ep2-tp2")
@pytest.mark.parametrize(
    "layout", [{"ep_size": 2}, {"ep_size": 2, "tp_size": 2}], ids=["ep2", "ep2-tp2"]
)
def test_merged_experts(pools: Pools, tmp_path: Path, layout: Layout) -> None:
    config = qwen3_moe(hidden_size=128, moe_intermediate_size=64, head_dim=32)
    lora = LoraConfig(
        r=3, target_modules=["q_proj", "o_proj"], target_parameters=EXPERTS, task_type="CAUSAL_LM"
    )
    start, adapter, expected = _adapter(config, lora, tmp_path)
    pools(2).run(_merge, start, adapter, str(tmp_path / "merged"), layout, four_bits())
    _check(tmp_path / "merged", expected)
