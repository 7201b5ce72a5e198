"""GGUF files of tiny stock models, made by the package gguf with the orders and names of llama.cpp's converter."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

ARCHITECTURES = {
    "mistral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "cohere": "command-r",
}
"""llama.cpp's names where they are others than transformers'."""
_ONE_ADDED = ("gemma2", "gemma3", "nemotron")
_MADE = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q8_0)  # that the package writes fast
_SCALES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}  # bytes at which halves lie


def write_gguf(path: Path, config: Any, kind: Kind = Kind.Q8_0, scaling: str | None = None) -> None:
    """Write a model of random weights, matrices in ``kind`` where its blocks fit; ``scaling``: of rotary embeddings, by
    its fields or by ``factors``.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 128)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    tokens = ["t", *map(str, range(10)), *(f"t{number}" for number in range(config.vocab_size))]
    writer.add_token_list(tokens[: config.vocab_size])
    writer.add_token_merges(["t 1", "t 2"])
    for name, values in _tensors(model, config, architecture):
        _add(writer, name, values, kind)
    if scaling == "factors":
        writer.add_tensor("rope_freqs.weight", np.full(config.head_dim // 2, 8.0, np.float32))
    elif scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(shape: tuple[int, ...], kind: Kind) -> NDArray[np.uint8]:
    """Random bytes of a matrix in ``kind``, whose scales are numbers."""
    entries, size = gguf.GGML_QUANT_SIZES[kind]
    words = np.random.default_rng(0).integers(0, 256, (*shape[:-1], shape[-1] // entries, size))
    words = words.astype(np.uint8)
    for begin in _SCALES.get(kind, ()):
        words[..., begin : begin + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return words.reshape(*shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, name: str, values: NDArray[Any], kind: Kind) -> None:
    values = np.ascontiguousarray(values)
    entries, _ = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim == 1 or values.shape[-1] % entries:
        writer.add_tensor(name, values)
    elif kind in _MADE:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, blocks(values.shape, kind), raw_dtype=kind)


def _tensors(model: Any, config: Any, architecture: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors of a model by llama.cpp's names, and in its orders."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads}
    heads["attn_k"] = getattr(config, "num_key_value_heads", config.num_attention_heads)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = tensor.numpy()
        base, _, ending = name.rpartition(".")
        if ".experts.gate_up_proj" in name:
            layer = name.split(".")[2]
            gate, up = np.split(values, 2, axis=1)
            yield f"blk.{layer}.ffn_up_exps.weight", up
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            continue
        if ".experts.down_proj" in name:
            base, ending = name, "weight"
        there = names.get_name(base)
        assert there is not None, name
        if architecture == "llama" and there.endswith(("attn_q", "attn_k")):
            count = heads[there.rpartition(".")[2]]
            by_halves = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
            values = by_halves.swapaxes(1, 2).reshape(values.shape)
        if architecture == "gpt2" and values.ndim == 2 and ".h." in name:  # Conv1D's
            values = values.T
        if architecture in _ONE_ADDED and there.endswith("norm"):
            values = values + 1
        if there.endswith("ffn_gate_inp_shexp"):
            values = values[0]
        yield f"{there}.{ending}", values
