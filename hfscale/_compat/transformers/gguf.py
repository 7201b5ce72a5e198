"""Read GGUF files by transformers: names of tensors, the config, the tokenizer, and whole models."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GgufConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .loading import forget_quantization

_METHOD = "gguf"
_OF_BLOCKS = "transformers.integrations.gguf"  # layers whose weights stay in blocks


def names_in_gguf(model: Any, architecture: str) -> dict[str, str]:
    """Map the names of tensors in GGUF files of an ``architecture`` to parameters of a full model. Names of experts'
    tensors lack the ending ``.weight``.
    """
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(model.config.to_dict())
    return get_gguf_hf_weights_map(model, processor, architecture)


def config_of_gguf(path: Path) -> Any:
    """Return the config of the model in a file; ``architectures`` defaults to the family's causal language model."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if not config.architectures and isinstance(name, str):
        config.architectures = [name]
    return config


def tokenizer_of_gguf(path: Path) -> Any:
    """Return the tokenizer in a file; raise transformers' own error if it cannot make one."""
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def weights_of_gguf(kind: Any, path: Path, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights of the model in a file, dequantized, as the class ``kind`` loads them."""
    model = kind.from_pretrained(
        path.parent,
        gguf_file=path.name,
        config=config,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
    )
    return dict(model.state_dict())


def forget_gguf(model: Any) -> None:
    """Remove the marks of quantization from a model that transformers read from a GGUF file, if all weights
    are plain.
    """
    described = getattr(getattr(model, "config", None), "quantization_config", None)
    method = getattr(described, "quant_method", None)
    in_blocks = any(type(module).__module__.startswith(_OF_BLOCKS) for module in model.modules())
    if getattr(method, "value", method) == _METHOD and not in_blocks:
        forget_quantization(model)
