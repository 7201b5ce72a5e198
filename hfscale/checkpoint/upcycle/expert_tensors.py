"""Make the tensors of a mixture of experts one at a time from those of a dense model.

Data flow: the target on the meta device tells the contents of its checkpoint; every dense tensor is read once. Tensors
outside of MLPs are copied under their names, and an MLP's projection is copied once per expert, varied on request. Two
tensors are in memory at a time, or four if experts vary; plus the stacked tensor if the target stores all experts in
one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..._compat.transformers.saving import stored_layout
from ...errors import CheckpointError, check_count, check_number
from ...train.runtime.initialize import seed_of
from .dense import WholeModel
from .moe_targets import DENSE, INTERMEDIATE_DIM, ExpertWeight, find_family

_BAR_AFTER_SECONDS = 2.0


@dataclass(frozen=True)
class Variation:
    """How experts differ from the dense MLP: by noise, and by partial re-initialization.

    Drop-Upcycling (Nakamura et al. 2025, "Drop-Upcycling: Training Sparse Mixture of Experts with Partial
    Re-initialization") redraws a fraction of an expert's hidden channels, with the mean and standard deviation of the
    weights that they replace. A channel is a row of ``gate``, the same row of ``up`` and the same column of ``down``.

    Attributes:
        noise: standard deviation of the noise on each weight, relative to that of the weight's matrix.
        reinitialize: fraction of the channels that are redrawn, different ones in each expert.
        seed: of both, and of the router.

    Raises:
        ConfigError: a value is impossible.
    """

    noise: float = 0.0
    reinitialize: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("noise", self.noise, least=0)
        check_number("reinitialize", self.reinitialize, least=0, most=1)
        check_count("seed", self.seed, least=0)

    def generator(self, name: str) -> torch.Generator:
        """Return a separate RNG for each name, so that no value depends on the order of draws."""
        return torch.Generator().manual_seed(seed_of(self.seed, name))

    def channels(self, width: int, layer: int, expert: int) -> Tensor:
        """Return the channels of an expert that are redrawn, the same in its three projections."""
        count = round(self.reinitialize * width)
        return torch.randperm(width, generator=self.generator(f"{layer}/{expert}/channels"))[:count]

    def apply(self, weight: Tensor, projection: str, layer: int, expert: int) -> Tensor:
        """Return an expert's weight made from the dense one, which is unchanged; the dense one itself if nothing
        varies.

        Args:
            projection: ``gate``, ``up`` or ``down``.
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
            varied.index_copy_(dim, channels, replaced.normal_(mean, deviation, generator=generator).to(weight.dtype))
        return varied


class Upcycling:
    """A dense model that is converted to a mixture of experts.

    Attributes:
        model: the target, on the meta device, with its config and the dense model's generation config.

    Raises:
        CheckpointError: the dense checkpoint lacks tensors, or has other shapes than its config says.
    """

    def __init__(self, dense: WholeModel, config: PreTrainedConfig, every: int, variation: Variation) -> None:
        self.dense, self.config, self.variation = dense, config, variation
        self.family = find_family(dense.config)
        self.layers = range(every - 1, dense.config.num_hidden_layers, every)  # that become mixtures
        self.num_experts: int = getattr(config, self.family.count_field)
        with torch.device("meta"):
            before = AutoModelForCausalLM.from_config(dense.config)
            self.model: Any = AutoModelForCausalLM.from_config(config)
        self.stored = _names_as_found(before, dense)
        self.dtype = self._type_of_mlps()
        self.model.config.dtype = self.dtype  # the config of a model in memory may be older than its weights
        if dense.generation is not None:
            self.model.generation_config = dense.generation

    def contents(self) -> dict[str, Tensor]:
        """Return all tensors of the target's checkpoint, on the meta device, in the dense model's dtypes."""
        layout = stored_layout(self.model, dict(self.model.named_parameters()))
        types = {name: self.dense.tensors[found].dtype for name, found in self.stored.items()}
        return {
            name: torch.empty(tensor.shape, dtype=types.get(name, self.dtype), device="meta")
            for name, tensor in layout.items()
        }

    def with_progress(self) -> Iterator[tuple[str, Tensor]]:
        """Yield :meth:`tensors`, under a progress bar if it takes long."""
        hidden = not logging.is_progress_bar_enabled()
        with tqdm(desc="upcycle", unit="B", unit_scale=True, delay=_BAR_AFTER_SECONDS, disable=hidden) as bar:
            for name, tensor in self.tensors():
                yield name, tensor
                bar.update(tensor.nbytes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the mixture under its stored name; each dense one is read once."""
        projections = self._projections()
        for name in self.stored:
            if name not in projections:
                yield name, self._read(name)
        for layer in self.layers:
            yield from self._gates(layer)
            for weight in self.family.weights:
                yield from self._apart(layer, weight) if "{expert}" in weight.name else self._stacked(layer, weight)

    def _gates(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """Yield a random router: equal scores would send every token to the first experts, and leave them equal."""
        router = torch.empty(self.num_experts, self.config.hidden_size, dtype=self.dtype)
        generator = self.variation.generator(f"{layer}/router")
        yield _prefix(layer) + self.family.router, router.normal_(0, self.config.initializer_range, generator=generator)
        if self.family.shared:
            yield _prefix(layer) + self.family.shared.gate, torch.zeros_like(router[:1])

    def _apart(self, layer: int, weight: ExpertWeight) -> Iterator[tuple[str, Tensor]]:
        (projection,) = weight.parts
        dense = self._read(_prefix(layer) + DENSE.format(projection=projection))
        if self.family.shared:
            yield _prefix(layer) + self.family.shared.name.format(projection=projection), dense
        for expert in range(self.num_experts):
            yield _prefix(layer) + weight.name.format(expert=expert), self._expert(dense, projection, layer, expert)

    def _stacked(self, layer: int, weight: ExpertWeight) -> Iterator[tuple[str, Tensor]]:
        whole, row = torch.empty(0), 0
        for projection in weight.parts:
            dense = self._read(_prefix(layer) + DENSE.format(projection=projection))
            if row == 0:
                whole = dense.new_empty(self.num_experts, len(weight.parts) * len(dense), dense.shape[1])
            for expert in range(self.num_experts):
                whole[expert, row : row + len(dense)] = self._expert(dense, projection, layer, expert)
            row += len(dense)
        yield _prefix(layer) + weight.name, whole

    def _expert(self, dense: Tensor, projection: str, layer: int, expert: int) -> Tensor:
        varied = self.variation.apply(dense, projection, layer, expert)
        start = self.family.start(projection)
        return varied if start == 1 else varied * start

    def _read(self, name: str) -> Tensor:
        return self.dense.read(self.stored[name])

    def _type_of_mlps(self) -> torch.dtype:
        """Return the dtype of experts and routers."""
        types = {self.dense.tensors[self.stored[name]].dtype for name in self._projections()}
        if len(types) > 1:
            raise CheckpointError(
                f"the MLPs of the dense checkpoint have several types, {', '.join(sorted(map(str, types)))}, and the "
                "experts of a layer are one tensor in the host: load it with one dtype and save it again"
            )
        return types.pop()

    def _projections(self) -> set[str]:
        """Return the names of the dense tensors that experts are made of."""
        return {_prefix(layer) + DENSE.format(projection=p) for layer in self.layers for p in INTERMEDIATE_DIM}


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _names_as_found(model: PreTrainedModel, dense: WholeModel) -> dict[str, str]:
    """Map each tensor that the dense ``model`` needs to the one of its tied names that is stored."""
    others: dict[str, list[str]] = {}
    for tied, owner in model.all_tied_weights_keys.items():
        others.setdefault(owner, []).append(tied)
        others.setdefault(tied, []).append(owner)
    found, missing = {}, []
    for name, parameter in model.named_parameters():
        there = [alias for alias in (name, *others.get(name, [])) if alias in dense.tensors]
        if not there:
            missing.append(name)
        elif tuple(dense.tensors[there[0]].shape) != tuple(parameter.shape):
            raise CheckpointError(
                f"the dense model's {there[0]} has the shape {tuple(dense.tensors[there[0]].shape)} and its config "
                f"says {tuple(parameter.shape)}: use the config it was saved with"
            )
        else:
            found[name] = there[0]
    if missing:
        raise CheckpointError(
            f"the dense checkpoint lacks {', '.join(missing[:4])}{' and more' if len(missing) > 4 else ''}: save the "
            "model again with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return found
