"""Weights as the Hub's quantized checkpoints store them, and the values that the host reads from them."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "intermediate_size": 96,
}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_SMALL |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
_MOE: dict[str, Any] = {**_SMALL, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_LATENT |= {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SMALL),
    "qwen3_moe": Qwen3MoeConfig(**_MOE, moe_intermediate_size=96, num_experts=4, head_dim=16),
    "deepseek_v3": DeepseekV3Config(**{**_MOE, **_LATENT}, moe_intermediate_size=96, n_routed_experts=4),
    "glm4_moe": Glm4MoeConfig(
        **_MOE, moe_intermediate_size=96, n_routed_experts=4, head_dim=16, first_k_dense_replace=1, n_group=1,
        topk_group=1,
    ),
    "minimax_m2": MiniMaxM2Config(**_MOE, num_local_experts=4, head_dim=16),
    "gpt_oss": GptOssConfig(**_MOE, num_local_experts=4, head_dim=16),
}  # fmt: skip


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it is stored: tensors by the ending of their names, and its values in a dtype."""

    tensors: dict[str, Tensor]
    values: Callable[[torch.dtype], Tensor]


@dataclass(frozen=True)
class Written:
    """A way to store weights.

    Attributes:
        description: the ``quantization_config``.
        store: stores one weight.
        chosen: whether the tensor of a name is stored so.
        strip: ending of a name that the tensors' endings replace.
    """

    description: dict[str, Any]
    store: Callable[[Tensor], StoredWeight]
    chosen: Callable[[str], bool]
    strip: str = ".weight"


def _linear(name: str) -> bool:
    return name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight", "with_mqa.weight"))


def _experts(name: str) -> bool:
    return ".experts." in name


# FP8


def fp8(
    block: tuple[int, int] | None, scales: torch.dtype = torch.float32
) -> Callable[[Tensor], StoredWeight]:
    """Store a weight by the host's own quantizer, with one scale per block or one in all."""

    def store(weight: Tensor) -> StoredWeight:
        config = FineGrainedFP8Config(weight_block_size=block)
        made = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert(
            {"m.weight": weight}
        )
        codes, scale = made["m.weight"], made["m.weight_scale_inv"].to(scales)
        rows, columns = (
            size // count for size, count in zip(codes.shape, scale.shape, strict=True)
        )
        spread = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        tensors = {".weight": codes, ".weight_scale_inv": scale if block else scale.reshape(())}
        return StoredWeight(tensors, lambda dtype: (codes.float() * spread).to(dtype))

    return store


def table(weight: Tensor) -> StoredWeight:
    """Store an embedding with one scale, by which the host multiplies the rows that it looks up, in their type."""
    scale = weight.abs().max().reshape(1) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {".weight": codes, ".weight_scale": scale}
    return StoredWeight(tensors, lambda dtype: codes.to(dtype) * scale.to(dtype))


def e2m1_in_fp8(weight: Tensor) -> StoredWeight:
    """Store a weight as DeepSeek-V4 does its experts: two codes per byte, and powers of two for 32 columns each."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(
        -128, 128, (weight.shape[0], weight.shape[1] // 2), generator=generator, dtype=torch.int8
    )
    scales = torch.randint(
        118, 130, (weight.shape[0], weight.shape[1] // 32), generator=generator, dtype=torch.uint8
    )
    exponents = scales.view(torch.float8_e8m0fnu)
    # lists, since releases differ in how they name a single tensor
    given = {"m.weight": [codes], "m.weight_scale_inv": [exponents.float()]}
    (whole,) = Fp8Dequantize(None).convert(given)["m.weight"]
    return StoredWeight({".weight": codes, ".scale": exponents}, lambda dtype: whole.to(dtype))


def mxfp8(weight: Tensor) -> StoredWeight:
    """Store a weight in 8-bit floating point, with the exponents of 32 columns each as bytes."""
    exponents = weight.abs().unflatten(1, (-1, 32)).amax(-1).log2().ceil() - 8
    spread = exponents.exp2().repeat_interleave(32, 1)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    tensors = {".weight": codes, ".weight_scale_inv": (exponents + 127).to(torch.uint8)}
    return StoredWeight(tensors, lambda dtype: (codes.float() * spread).to(dtype))


# MXFP4


def mxfp4(weight: Tensor) -> StoredWeight:
    """Store experts ``[experts, in, out]`` as gpt-oss does: any codes, since only reading them matters."""
    experts, inputs, outputs = weight.shape
    generator = torch.Generator().manual_seed(int(weight.float().abs().sum() * 1000))
    blocks = torch.randint(
        0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
    )
    scales = torch.randint(112, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
    tensors = {"_blocks": blocks, "_scales": scales}
    return StoredWeight(
        tensors, lambda dtype: convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    )


# compressed-tensors


def described_groups(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    described = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
    }
    return {
        **described,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack whole numbers along the last dim into int32 words, bit by bit."""
    stream = codes.long() + (1 << bits - 1)
    digits = (stream.unsqueeze(-1) >> torch.arange(bits) & 1).flatten(-2)
    digits = torch.nn.functional.pad(digits, (0, -digits.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = (digits << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def integers(
    bits: int = 4, group: int | None = 16, symmetric: bool = True, pack: bool = True
) -> Callable[[Tensor], StoredWeight]:
    """Store a weight in whole numbers with scales of groups of a row, or of rows, in bfloat16."""

    def store(weight: Tensor) -> StoredWeight:
        width = group or weight.shape[1]
        top = (1 << bits - 1) - 1
        grouped = weight.float().unflatten(1, (-1, width))
        scales = (grouped.abs().amax(-1) / top).clamp(min=1e-4).bfloat16()
        zeros = (
            torch.zeros_like(scales)
            if symmetric
            else (grouped.mean(-1) / scales).round().clamp(-3, 3)
        )
        codes = (
            (grouped / scales.float().unsqueeze(-1) + zeros.float().unsqueeze(-1))
            .round()
            .clamp(-top - 1, top)
        )
        codes = codes.to(torch.int8)
        values = (
            (codes.bfloat16() - zeros.bfloat16().unsqueeze(-1)) * scales.unsqueeze(-1)
        ).flatten(1)
        tensors = {".weight_scale": scales}
        if pack:
            tensors |= {
                ".weight_packed": packed(codes.flatten(1), bits),
                ".weight_shape": torch.tensor(weight.shape),
            }
        else:
            tensors[".weight"] = codes.flatten(1)
        if not symmetric:
            whole = zeros.to(torch.int8)
            tensors[".weight_zero_point"] = packed(whole.T, bits).T.contiguous() if pack else whole
        return StoredWeight(tensors, lambda dtype: values.to(dtype))

    return store


def float8(rows: bool, scales: torch.dtype = torch.float32) -> Callable[[Tensor], StoredWeight]:
    """Store a weight in 8-bit floating point with a scale per row, or one in all."""

    def store(weight: Tensor) -> StoredWeight:
        most = (
            weight.float().abs().amax(1, keepdim=True)
            if rows
            else weight.float().abs().max().view(1)
        )
        scale = (most / 448).to(scales)
        codes = (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.ones(1)}
        return StoredWeight(tensors, lambda dtype: (codes.to(scales) * scale).to(dtype))

    return store


def nvfp4(weight: Tensor) -> StoredWeight:
    """Store a weight in E2M1 with 8-bit scales of 16 numbers and one of all."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    grouped = weight.float().unflatten(1, (-1, 16))
    whole = (448 * 6 / grouped.abs().max()).view(1)
    scales = (grouped.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    true = scales.bfloat16() / whole
    places = ((grouped / true.unsqueeze(-1)).abs().unsqueeze(-1) - levels).abs().argmin(-1)
    codes = (places + 8 * (grouped < 0)).to(torch.uint8).flatten(1)
    numbers = (levels[places] * torch.where(grouped < 0, -1.0, 1.0)).bfloat16().float()
    values = (numbers * true.unsqueeze(-1)).flatten(1).bfloat16()
    tensors = {".weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, ".weight_scale": scales}
    return StoredWeight({**tensors, ".weight_global_scale": whole}, lambda dtype: values.to(dtype))


def mxfp4_packed(weight: Tensor) -> StoredWeight:
    """Store a weight in E2M1 codes of any value with powers of two of 32 columns each, as compressed-tensors does."""
    made = mxfp4(weight.T.unsqueeze(0))
    blocks = made.tensors["_blocks"][0]
    scales = made.tensors["_scales"][0]
    tensors = {".weight_packed": blocks.flatten(1), ".weight_scale": scales}
    return StoredWeight(tensors, lambda dtype: made.values(torch.bfloat16)[0].T.to(dtype))


# The host's own quantizers


def llm_int8(weight: Tensor) -> StoredWeight:
    """Store a weight as bitsandbytes does in 8 bits: 127ths of the largest of each row."""
    largest = weight.abs().amax(1)
    codes = (weight * (127 / largest).unsqueeze(1)).round().to(torch.int8)
    values = codes * largest.unsqueeze(1) * 7.874015718698502e-3
    order = torch.zeros((), dtype=torch.uint8)
    tensors = {".weight": codes, ".SCB": largest, ".weight_format": order}
    return StoredWeight(tensors, lambda dtype: values.to(dtype))


def torchao(kind: torch.dtype, scales: torch.dtype) -> Callable[[Tensor], StoredWeight]:
    """Store a weight as torchao does: by rows in float8, by 32 columns in int8, with zero points."""

    def store(weight: Tensor) -> StoredWeight:
        width = 32 if kind == torch.int8 else weight.shape[1]
        scale = (weight.unflatten(1, (-1, width)).abs().amax(-1) / 100).to(scales)
        spread = scale.repeat_interleave(width, 1)
        if kind != torch.int8:
            codes = (weight / spread).to(kind)
            tensors = {"._weight_qdata": codes, "._weight_scale": scale}
            return StoredWeight(tensors, lambda dtype: (codes.float() * spread).to(dtype))
        zeros = torch.arange(scale.numel()).remainder(7).view(scale.shape).to(torch.int8)
        codes = (weight / spread).round().to(torch.int8)
        tensors = {
            "._weight_qdata": codes,
            "._weight_scale": scale,
            "._weight_zero_point": zeros,
        }
        moved = zeros.repeat_interleave(width, 1)
        return StoredWeight(
            tensors, lambda dtype: ((codes.to(dtype) - moved.to(dtype)) * spread).to(dtype)
        )

    return store


def gemma(bits: int, embedding: bool = False) -> Callable[[Tensor], StoredWeight]:
    """Store a weight as Gemma's own quantizer does, in bytes of several numbers."""

    def store(weight: Tensor) -> StoredWeight:
        scale = weight.abs().amax(1, keepdim=True) / 2 ** (bits - 1)
        codes = (weight / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).long()
        each = (codes + 2 ** (bits - 1)).unflatten(1, (-1, 8 // bits))
        shifts = torch.arange(0, 8, bits)
        words = (each << shifts).sum(-1).to(torch.uint8)
        words = codes.to(torch.int8) if bits == 8 else words
        names = (".embedding_quantized", ".embedding_scale")
        names = names if embedding else (".weight", ".weight_scale")
        tensors = dict(zip(names, (words, scale), strict=True))
        return StoredWeight(tensors, lambda dtype: codes.to(dtype) * scale.to(dtype))

    return store


def _fp8_description(block: list[int] | None) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
}
WRITTEN = {
    "fp8": Written(_fp8_description([16, 32]), fp8((16, 32)), _linear),
    "fp8 per tensor": Written(_fp8_description(None), fp8(None, torch.bfloat16), _linear),
    "mxfp4": Written({"quant_method": "mxfp4"}, mxfp4, lambda name: name.endswith("_proj"), ""),
    "int4": Written(described_groups("pack-quantized", _INT4), integers(), _linear),
    "int4 experts": Written(described_groups("pack-quantized", _INT4), integers(), _experts),
    "float8": Written(described_groups("float-quantized", _FLOAT8), float8(rows=True), _linear),
    "nvfp4": Written(described_groups("nvfp4-pack-quantized", _NVFP4), nvfp4, _linear),
}


def write(config: PreTrainedConfig, way: Written, stored: Path, plain: Path) -> None:
    """Write a model's random weights twice: stored as ``way`` says, and as the values that are read from it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(stored)
    tensors = load_file(stored / "model.safetensors")
    packed_ones: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not way.chosen(name):
            packed_ones[name] = values[name] = tensor
            continue
        weight = way.store(tensor.float() * 20)
        packed_ones |= {
            name.removesuffix(way.strip) + end: t.contiguous() for end, t in weight.tensors.items()
        }
        values[name] = weight.values(torch.float32).contiguous()
    described = json.loads((stored / "config.json").read_text())
    plain.mkdir(parents=True)
    (plain / "config.json").write_text(json.dumps(described))
    (stored / "config.json").write_text(
        json.dumps({**described, "quantization_config": way.description})
    )
    save_file(packed_ones, stored / "model.safetensors", {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})


def write_pairs(
    pairs: Iterable[tuple[str, str]], make: Callable[[str], Path]
) -> dict[tuple[str, str], Path]:
    """Return a directory for each pair of family and form, in which ``stored`` is quantized, and ``plain`` has the
    values it stands for; ``make`` creates a directory of a name.
    """
    found = {}
    for family, form in pairs:
        found[family, form] = path = make("written")
        write(CONFIGS[family], WRITTEN[form], path / "stored", path / "plain")
    return found
