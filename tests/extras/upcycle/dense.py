"""Small dense checkpoints, and how they and what is made of them are compared."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hfscale.testing import keep_float64

IDS = torch.randint(0, 67, (2, 19), generator=torch.Generator().manual_seed(1))
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,  # the host's grouped matrix products take multiples of 16 bytes
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_dense(
    directory: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """A dense checkpoint whose every parameter has something to say, biases and norms too."""
    kwargs = (
        {"max_shard_size": changes.pop("max_shard_size")} if "max_shard_size" in changes else {}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**SMALL, **changes})
    ).to(dtype)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory, **kwargs)
    return directory


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", experts_implementation="eager"
    )


def stored(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), keep_float64():
        return model.eval()(IDS).logits


def distance(one: Any, other: Any) -> float:
    return float((logits(one) - logits(other)).abs().max())
