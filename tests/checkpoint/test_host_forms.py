"""Checkpoints of bitsandbytes' 8 bits, of torchao's and of Gemma's quantizers are read as plain values."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

import hfscale
from hfscale import CheckpointError, ParallelConfig, PlanError
from hfscale.testing import RankPool

from ..tiny_models import tiny

try:
    from transformers import GemmaQuantizationConfig
    from transformers.integrations.gemma_quant import QuantizedEmbedding, replace_with_quant_layers
except ImportError:  # releases before it
    GemmaQuantizationConfig = None

Pools = Callable[[int], RankPool]
LAYOUTS = [{"tp_size": 2}, {"pp_size": 2}, {"dp_shard_size": 2}]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
needs_gemma = pytest.mark.skipif(
    GemmaQuantizationConfig is None, reason="this transformers lacks it"
)


def config(**changes: Any) -> LlamaConfig:
    made = tiny("llama", **SIZES, **changes)
    assert isinstance(made, LlamaConfig)
    return made


def describe(directory: Path, description: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": description})
    )


def write_int8(directory: Path) -> dict[str, Tensor]:
    """Write a model that the host has quantized; return the values that it dequantizes to."""
    torch.manual_seed(0)
    plain = directory / "plain"
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(plain)
    asked = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=asked)
    model.save_pretrained(directory / "stored")
    stock = AutoModelForCausalLM.from_pretrained(directory / "stored")
    return dict(stock.dequantize().state_dict())


def write_gemma(directory: Path) -> dict[str, Tensor]:
    """Write random weights in 2, 4 and 8 bits; return the values that the host computes with, in bfloat16."""
    description = {
        "quant_method": "gemma",
        "num_bits": 4,
        "quantize_embeddings": True,
        "module_quant_configs": {r"mlp\.up_proj": {"num_bits": 2}, "q_proj": {"num_bits": 8}},
        "modules_to_not_convert": ["lm_head"],
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    model.save_pretrained(directory / "stored")
    asked = GemmaQuantizationConfig(**description)
    with torch.no_grad():
        replace_with_quant_layers(model, asked, ["lm_head"])
    state = {name: _any(tensor) for name, tensor in model.state_dict().items()}
    save_file(state, directory / "stored" / "model.safetensors", {"format": "pt"})
    describe(directory / "stored", description)
    stock = AutoModelForCausalLM.from_pretrained(directory / "stored", dtype=torch.bfloat16)
    values = dict(stock.state_dict())
    for name, module in stock.named_modules():
        if isinstance(module, QuantizedEmbedding):
            values[f"{name}.weight"] = module.weight
        elif hasattr(module, "_dequantize_weights"):
            values[f"{name}.weight"] = module._dequantize_weights(torch.bfloat16)
    return values


def _any(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return torch.rand_like(tensor)
    bounds = torch.iinfo(tensor.dtype)
    return torch.randint(bounds.min, bounds.max + 1, tensor.shape, dtype=tensor.dtype)


def loaded(path: str, layout: dict[str, int], **options: Any) -> dict[str, Any]:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), **options)
    return dict(hfscale.stream_weights(model))


@pytest.mark.parametrize("write", [write_int8, pytest.param(write_gemma, marks=needs_gemma)])
def test_weights_are_those_of_stock(
    write: Callable[[Path], dict[str, Tensor]], pools: Pools, tmp_path: Path
) -> None:
    values = write(tmp_path)
    stored = str(tmp_path / "stored")
    found = [loaded(stored, {}, dtype=torch.bfloat16)]
    for layout in LAYOUTS:
        found += pools(2).run(loaded, stored, layout, dtype=torch.bfloat16)[:1]
    for each in found:
        for name, value in each.items():
            assert torch.equal(value, values[name].to(torch.bfloat16)), name


def test_rows_in_another_order_are_refused(tmp_path: Path) -> None:
    write_int8(tmp_path)
    file = tmp_path / "stored" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".weight_format"))
    tensors[name] = tensors[name] + 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="must be stored row by row"):
        hfscale.from_pretrained(tmp_path / "stored")


@pytest.mark.parametrize(
    ("type_", "words"),
    [
        (
            {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}},
            r"torchao, Int4WeightOnly",
        ),
        ({}, r"torchao, no type"),
    ],
)
def test_other_types_of_torchao_are_refused(type_: dict[str, Any], words: str) -> None:
    described = copy.deepcopy(config())
    described.quantization_config = {"quant_method": "torchao", "quant_type": {"default": type_}}
    with pytest.raises(PlanError, match=words):
        hfscale.plan(described)


@pytest.mark.torchao
@pytest.mark.parametrize("kind", ["int8", "float8", "int4 in int8"])
def test_weights_are_torchaos(kind: str, pools: Pools, tmp_path: Path) -> None:
    from torchao import quantization as torchao
    from transformers import TorchAoConfig

    torch.manual_seed(0)
    plain = tmp_path / "plain"
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(plain)
    asked = {
        "int8": torchao.Int8WeightOnlyConfig(version=2),
        "float8": torchao.Float8WeightOnlyConfig(),
        "int4 in int8": torchao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=torchao.granularity.PerGroup(32)
        ),
    }
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=TorchAoConfig(asked[kind]), dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "stored")
    values = {
        name: t.dequantize() if hasattr(t, "qdata") else t for name, t in model.state_dict().items()
    }
    for layout in [{}, *LAYOUTS]:
        run = pools(2).run if layout else lambda function, *given: [function(*given)]
        found = run(loaded, str(tmp_path / "stored"), layout)[0]
        assert all(torch.equal(value, values[name]) for name, value in found.items())
