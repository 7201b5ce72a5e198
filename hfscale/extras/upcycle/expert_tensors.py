"""Read a dense model (a directory, a Hub id, or in memory), and make the tensors of a mixture of experts one by one.

The target on the meta device determines the contents of its checkpoint; every dense tensor is read once. Tensors
outside MLPs are copied under their names. A projection of an MLP is copied once per expert, and varied on request. At
most two tensors are in memory at a time (four if experts vary), plus the stacked tensor if the target stores all
experts in one.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from ..._compat.transformers.classes import class_name, is_distributed_by_host
from ..._compat.transformers.stored import AsStored
from ...distributed.files.reader import TensorOnDisk, named_files
from ...distributed.files.replace import finish_move
from ...distributed.files.weight_files import open_tensors, weight_files
from ...distributed.files.writer import INDEX, WEIGHTS
from ...errors import CheckpointError, ConfigError, check_count, check_number
from ...train.runtime import find_runtime
from ...train.runtime.initialize import seed_of
from .moe_targets import DENSE, INTERMEDIATE_DIM, ExpertWeight, find_family

_BAR_AFTER_SECONDS = 2.0
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
"""Patterns of a tokenizer's files in a checkpoint."""
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class WholeModel:
    """A full model's config and tensors; tensors are read on demand."""

    config: PreTrainedConfig
    tensors: Mapping[str, Tensor | TensorOnDisk]  # stored name -> tensor, on disk or in memory
    generation: GenerationConfig | None  # generation config, if the model has one
    directory: Path | None  # the model's directory; ``None`` if it is in memory

    def read(self, name: str) -> Tensor:
        """Return a copy of one tensor on the CPU."""
        tensor = self.tensors[name]
        return tensor[...] if isinstance(tensor, TensorOnDisk) else tensor.detach().cpu().clone()


def open_whole(source: PreTrainedModel | str | os.PathLike[str]) -> WholeModel:
    """Open a full model for reading: a stock model in memory, or a complete safetensors checkpoint."""
    return _in_memory(source) if not isinstance(source, (str, os.PathLike)) else _on_disk(source)


def _in_memory(model: Any) -> WholeModel:
    kind = class_name(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"a {kind} is not a model of transformers: give such a model, the directory of a checkpoint or a Hub id; "
            "for a model with an adapter, merge the adapter first (merge_and_unload())"
        )
    tensors = dict(model.named_parameters())
    spread = is_distributed_by_host(model, spread=False)
    reason = "hfscale parallelized it" if find_runtime(model) else spread
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        reason = "its parameters are sharded"
    if any(tensor.is_meta for tensor in tensors.values()):
        reason = "it has no weights (meta device)"
    if reason:
        raise ConfigError(
            f"this {kind} is not a full model in memory ({reason}): save it, and give its directory"
        )
    return WholeModel(model.config, tensors, getattr(model, "generation_config", None), None)


def _on_disk(source: str | os.PathLike[str]) -> WholeModel:
    directory = Path(source)
    if not directory.is_dir():
        wanted = ["config.json", _GENERATION, "model*.safetensors", INDEX, *TOKENIZER_FILES]
        try:
            directory = Path(snapshot_download(str(source), allow_patterns=wanted))
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise CheckpointError(
                f"{str(source)!r} is neither a local directory nor a model on the Hub ({type(error).__name__}: "
                f"{error}): correct the path or the Hub id, or download the model first"
            ) from error
    finish_move(directory)
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{source} has no config.json: give the directory of a Hugging Face checkpoint"
        )
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    tensors = open_tensors(_weight_files(directory))
    generation = (
        GenerationConfig.from_pretrained(directory) if (directory / _GENERATION).is_file() else None
    )
    return WholeModel(config, tensors, generation, directory)


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).is_file():  # like transformers, prefer the single file
        return [directory / WEIGHTS]
    if (directory / INDEX).is_file():
        return named_files(directory / INDEX)
    if files := weight_files(directory):
        return files
    raise CheckpointError(
        f"{directory} has neither {WEIGHTS} nor {INDEX}: give the directory of a Hugging Face checkpoint"
    )


@dataclass(frozen=True)
class Variation:
    """Describe how experts differ from the dense MLP: by noise, and by partial re-initialization.

    Drop-Upcycling (Nakamura et al. 2025, "Drop-Upcycling: Training Sparse Mixture of Experts with Partial
    Re-initialization") redraws a fraction of an expert's hidden channels, with the mean and standard deviation of the
    weights that they replace. A channel is a row of ``gate``, the same row of ``up`` and the same column of ``down``.
    """

    noise: float = 0.0  # standard deviation of the noise on each weight, relative to that of the weight's matrix
    # Fraction of the channels that are redrawn; the channels differ between experts.
    reinitialize: float = 0.0
    seed: int = 0  # seed of noise, channels and router

    def __post_init__(self) -> None:
        check_number("noise", self.noise, least=0)
        check_number("reinitialize", self.reinitialize, least=0, most=1)
        check_count("seed", self.seed, least=0)

    def generator(self, name: str) -> torch.Generator:
        """Return a separate RNG for each name, so that no value depends on the order of draws."""
        return torch.Generator().manual_seed(seed_of(self.seed, name))

    def channels(self, width: int, layer: int, expert: int) -> Tensor:
        """Return the channels of an expert that are redrawn, the same channels in all three projections."""
        count = round(self.reinitialize * width)
        return torch.randperm(width, generator=self.generator(f"{layer}/{expert}/channels"))[:count]

    def apply(self, weight: Tensor, projection: str, layer: int, expert: int) -> Tensor:
        """Return an expert's weight, made from the dense ``weight`` by noise and by redrawing channels; the dense
        weight itself if neither is asked for.
        """
        if not self.noise and not self.reinitialize:
            return weight
        generator = self.generator(f"{layer}/{expert}/{projection}")
        precise = torch.promote_types(weight.dtype, torch.float32)
        varied = weight.clone()
        if self.noise:
            # Drawn in the weight's own dtype, so that a 16-bit matrix is never held in 32 bits.
            deviation = float(weight.std(correction=0)) * self.noise
            varied += torch.empty_like(weight).normal_(0, deviation, generator=generator)
        dim = INTERMEDIATE_DIM[projection]
        channels = self.channels(weight.shape[dim], layer, expert)
        if len(channels):
            replaced = weight.index_select(dim, channels).to(precise)
            deviation, mean = (float(value) for value in torch.std_mean(replaced, correction=0))
            varied.index_copy_(
                dim,
                channels,
                replaced.normal_(mean, deviation, generator=generator).to(weight.dtype),
            )
        return varied


class Upcycling:
    """Convert a dense model to a mixture-of-experts model, tensor by tensor; ``model`` is the target on the meta
    device. Raise :class:`CheckpointError` if the dense model's tensors do not fit the target.
    """

    def __init__(
        self, dense: WholeModel, config: PreTrainedConfig, every: int, variation: Variation
    ) -> None:
        self.dense = dense
        self.config = config
        self.variation = variation
        self.family = find_family(dense.config)
        # The layers that become mixtures.
        self.layers = range(every - 1, dense.config.num_hidden_layers, every)
        self.num_experts: int = getattr(config, self.family.count_field)
        with torch.device("meta"):
            before = AutoModelForCausalLM.from_config(dense.config)
            self.model: Any = AutoModelForCausalLM.from_config(config)
        self.stored = _names_as_found(before, dense)
        types = {dense.tensors[self.stored[name]].dtype for name in self._projections()}
        if len(types) > 1:
            raise CheckpointError(
                f"the MLPs of the dense checkpoint have several dtypes, {', '.join(sorted(map(str, types)))}, but "
                "transformers holds the experts of a layer in one tensor: load the dense model with one dtype and "
                "save it again"
            )
        self.dtype: torch.dtype = types.pop()  # dtype of experts and routers
        # The config of a model in memory may name another dtype than its weights now have.
        self.model.config.dtype = self.dtype
        if dense.generation is not None:
            self.model.generation_config = dense.generation

    def contents(self) -> dict[str, Tensor]:
        """Return all tensors of the target's checkpoint, on the meta device, in the dense model's dtypes."""
        layout = AsStored(self.model, dict(self.model.named_parameters())).layout
        types = {
            name: self.dense.tensors[stored_name].dtype for name, stored_name in self.stored.items()
        }
        return {
            name: torch.empty(
                tensor.shape,
                dtype=types.get(name, self.dtype),
                device="meta",
            )
            for name, tensor in layout.items()
        }

    def with_progress(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of :meth:`tensors`, with a progress bar of the bytes if this takes long."""
        hidden = not logging.is_progress_bar_enabled()
        with tqdm(
            desc="upcycle", unit="B", unit_scale=True, delay=_BAR_AFTER_SECONDS, disable=hidden
        ) as bar:
            for name, tensor in self.tensors():
                yield name, tensor
                bar.update(tensor.nbytes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the mixture-of-experts model under its name in the checkpoint; each dense tensor is
        read once.
        """
        projections = self._projections()
        for name in self.stored:
            if name not in projections:
                yield name, self._read(name)
        for layer in self.layers:
            yield from self._gates(layer)
            for weight in self.family.weights:
                yield from (
                    self._apart(layer, weight)
                    if "{expert}" in weight.name
                    else self._stacked(layer, weight)
                )

    def _gates(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """Yield a randomly initialized router, with the gate of a shared expert if there is one: equal scores would
        send all tokens to the first experts, which would stay equal.
        """
        router = torch.empty(self.num_experts, self.config.hidden_size, dtype=self.dtype)
        generator = self.variation.generator(f"{layer}/router")
        yield (
            _prefix(layer) + self.family.router,
            router.normal_(0, self.config.initializer_range, generator=generator),
        )
        if self.family.shared:
            yield _prefix(layer) + self.family.shared.gate, torch.zeros_like(router[:1])

    def _apart(self, layer: int, weight: ExpertWeight) -> Iterator[tuple[str, Tensor]]:
        (projection,) = weight.parts
        dense = self._read(_prefix(layer) + DENSE.format(projection=projection))
        if self.family.shared:
            yield _prefix(layer) + self.family.shared.name.format(projection=projection), dense
        for expert in range(self.num_experts):
            yield (
                _prefix(layer) + weight.name.format(expert=expert),
                self._expert(dense, projection, layer, expert),
            )

    def _stacked(self, layer: int, weight: ExpertWeight) -> Iterator[tuple[str, Tensor]]:
        whole = torch.empty(0)
        row = 0
        for projection in weight.parts:
            dense = self._read(_prefix(layer) + DENSE.format(projection=projection))
            if row == 0:
                whole = dense.new_empty(
                    self.num_experts, len(weight.parts) * len(dense), dense.shape[1]
                )
            for expert in range(self.num_experts):
                whole[expert, row : row + len(dense)] = self._expert(
                    dense, projection, layer, expert
                )
            row += len(dense)
        yield _prefix(layer) + weight.name, whole

    def _expert(self, dense: Tensor, projection: str, layer: int, expert: int) -> Tensor:
        varied = self.variation.apply(dense, projection, layer, expert)
        return varied * 0.5 if self.family.shared and projection == "down" else varied

    def _read(self, name: str) -> Tensor:
        return self.dense.read(self.stored[name])

    def _projections(self) -> set[str]:
        """Return the names of the dense tensors that become experts."""
        return {
            _prefix(layer) + DENSE.format(projection=p)
            for layer in self.layers
            for p in INTERMEDIATE_DIM
        }


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _names_as_found(model: PreTrainedModel, dense: WholeModel) -> dict[str, str]:
    """Map the name of each parameter that the dense ``model`` has to its name in the checkpoint, which may be the name
    of a tied parameter.
    """
    others: dict[str, list[str]] = {}
    for tied, owner in model.all_tied_weights_keys.items():
        others.setdefault(owner, []).append(tied)
        others.setdefault(tied, []).append(owner)
    names = {}
    missing = []
    for name, parameter in model.named_parameters():
        there = [
            alias
            for alias in (
                name,
                *others.get(name, []),
            )
            if alias in dense.tensors
        ]
        if not there:
            missing.append(name)
        elif tuple(dense.tensors[there[0]].shape) != tuple(parameter.shape):
            raise CheckpointError(
                f"the dense model's {there[0]} has the shape {tuple(dense.tensors[there[0]].shape)} but its config "
                f"says {tuple(parameter.shape)}: use the config it was saved with"
            )
        else:
            names[name] = there[0]
    if missing:
        raise CheckpointError(
            f"the dense checkpoint lacks {', '.join(missing[:4])}{' and more' if len(missing) > 4 else ''}: save the "
            "model again with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return names
