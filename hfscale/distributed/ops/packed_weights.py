"""Frozen weights that are held as packed bytes, which data ranks can shard and gather like any other tensor.

A packed parameter is one tensor ``uint8 [shards, bytes]``: row ``s`` was read, or quantized, by data rank ``s`` and
holds all that is needed to compute the values of its shard. The gathered rows are the weight that all data ranks
compute with, and a frozen :class:`Packing` beside the parameter says how to read them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..._compat.torch import own_parameters

_PACKINGS = "_packings"


@dataclass(frozen=True)
class Packing(ABC):
    """How to read a packed weight."""

    # ``[matrices, rows, columns]`` of the gathered weight; a projection is one matrix.
    shape: tuple[int, int, int]
    dtype: torch.dtype  # the dtype of its values
    # That experts compute in; ``None``: their input's. A projection knows its own.
    compute_dtype: torch.dtype | None

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, int]:
        """The shape of the gathered bytes: one row per data rank."""

    @abstractmethod
    def unpack(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values ``[matrices, rows, columns]`` of the gathered bytes, by default in :attr:`dtype`."""

    def marks(self) -> Mapping[str, Any]:
        """Return the attributes of the parameter that PEFT reads."""
        return {}


def as_bytes(tensor: Tensor) -> Tensor:
    """Return plain bytes; mixed precision may have cast them to floats (0 to 255 are exact in bfloat16)."""
    plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return plain if plain.dtype == torch.uint8 else plain.to(torch.uint8)


def gathered(tensor: Tensor) -> Tensor:
    """Return the bytes of all data ranks, gathered if necessary; every data rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def packings_of(module: nn.Module) -> dict[str, Packing]:
    """Return the packings of a module's packed parameters, by name."""
    return module.__dict__.get(_PACKINGS, {})


def register_packed(module: nn.Module, name: str, packing: Packing) -> None:
    """Give ``module`` a packed parameter ``name``, on the meta device."""
    module.__dict__.setdefault(_PACKINGS, {})[name] = packing
    empty = torch.empty(packing.row_shape, dtype=torch.uint8, device="meta")
    own_parameters(module)[name] = nn.Parameter(empty, requires_grad=False)
    mark(module)


def mark(module: nn.Module) -> None:
    """Set the attributes of packed weights that PEFT reads from stock ones."""
    for name, packing in packings_of(module).items():
        vars(own_parameters(module)[name]).update(packing.marks())


@contextmanager
def shown_unpacked(model: nn.Module) -> Iterator[None]:
    """Replace packed experts inside the `with` block by meta parameters of the unpacked shape, for PEFT."""
    kept = []
    for module in model.modules():
        for name, packing in packings_of(module).items():
            if name != "weight":
                kept.append((module, name, own_parameters(module)[name]))
                empty = torch.empty(packing.shape, dtype=packing.dtype, device="meta")
                own_parameters(module)[name] = nn.Parameter(empty, requires_grad=False)
    try:
        yield
    finally:
        for module, name, packed in kept:
            own_parameters(module)[name] = packed


def read_packed(
    module: nn.Module,
    name: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the values ``[matrices, rows, columns]`` of a packed parameter, whose bytes must be gathered."""
    parameter: Any = own_parameters(module)[name]
    return packings_of(module)[name].unpack(parameter, dtype)
