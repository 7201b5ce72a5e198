"""Read a full model tensor by tensor, from a directory, the Hub or memory."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..._compat.transformers.classes import class_name, is_distributed_by_host
from ...distributed.files.reader import TensorOnDisk, named_files, open_tensors
from ...distributed.files.replace import finish_move
from ...distributed.files.writer import INDEX, WEIGHTS
from ...errors import CheckpointError, ConfigError
from ...train.runtime import find_runtime

TOKENIZER_FILES = (
    *("tokenizer*", "vocab.*", "merges.txt", "*.tiktoken", "*.model", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*"),
)
"""Patterns of a tokenizer's files in a checkpoint."""
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class WholeModel:
    """A full model's config and tensors, read on demand.

    Attributes:
        tensors: stored name -> tensor, on disk or in memory.
        generation: its generation config, if it has one.
        directory: its directory; ``None`` in memory.
    """

    config: PreTrainedConfig
    tensors: Mapping[str, Tensor | TensorOnDisk]
    generation: GenerationConfig | None
    directory: Path | None

    def read(self, name: str) -> Tensor:
        """Return a copy of one tensor on the CPU."""
        tensor = self.tensors[name]
        return tensor[...] if isinstance(tensor, TensorOnDisk) else tensor.detach().cpu().clone()


def open_whole(source: PreTrainedModel | str | os.PathLike[str]) -> WholeModel:
    """Open a full model for reading.

    Raises:
        ConfigError: a model in memory is sharded, on the meta device, or not a stock model.
        CheckpointError: there is no complete safetensors checkpoint.
    """
    return _in_memory(source) if not isinstance(source, (str, os.PathLike)) else _on_disk(source)


def _in_memory(model: Any) -> WholeModel:
    kind = class_name(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"a {kind} is not a model of transformers: give one, the directory of a checkpoint or a Hub id; an adapter "
            "is merged first (merge_and_unload())"
        )
    tensors = dict(model.named_parameters())
    reason = "hfscale parallelized it" if find_runtime(model) else is_distributed_by_host(model)
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        reason = "its parameters are sharded"
    if any(tensor.is_meta for tensor in tensors.values()):
        reason = "it has no weights (meta device)"
    if reason:
        raise ConfigError(f"this {kind} is not whole in memory: {reason}. Save it, and give the directory")
    return WholeModel(model.config, tensors, getattr(model, "generation_config", None), None)


def _on_disk(source: str | os.PathLike[str]) -> WholeModel:
    directory = Path(source)
    if not directory.is_dir():
        directory = _download(str(source))
    finish_move(directory)
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json: give the directory of a Hugging Face checkpoint")
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    tensors = open_tensors(_weight_files(directory))
    generation = GenerationConfig.from_pretrained(directory) if (directory / _GENERATION).is_file() else None
    return WholeModel(config, tensors, generation, directory)


def _download(name: str) -> Path:
    wanted = ["config.json", _GENERATION, "model*.safetensors", INDEX, *TOKENIZER_FILES]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"{name!r} is neither a directory here nor a model that the Hub gave ({type(error).__name__}: {error}): "
            "correct it, or download the model first"
        ) from error


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).is_file():  # transformers prefers it too
        return [directory / WEIGHTS]
    if not (directory / INDEX).is_file():
        raise CheckpointError(
            f"{directory} has neither {WEIGHTS} nor {INDEX}: convert the model once with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return named_files(directory / INDEX)
