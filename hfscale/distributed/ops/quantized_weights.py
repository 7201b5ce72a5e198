"""Frozen weights that are held as bytes, which data ranks can shard and gather like any other tensor.

A quantized parameter is one tensor ``uint8 [shards, bytes]``: row ``s`` was read, or quantized, by data rank ``s`` and
holds all that is needed to compute the values of its shard. The gathered rows are the weight that all data ranks
compute with, and a frozen :class:`Encoding` beside the parameter says how to read them.
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

_ENCODINGS = "_encodings"


@dataclass(frozen=True)
class Encoding(ABC):
    """How to read a quantized weight."""

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
    def decode(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
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


def encodings_of(module: nn.Module) -> dict[str, Encoding]:
    """Return the encodings of a module's quantized parameters, by name."""
    return module.__dict__.get(_ENCODINGS, {})


def register_quantized(module: nn.Module, name: str, encoding: Encoding) -> None:
    """Give ``module`` a quantized parameter ``name``, on the meta device."""
    module.__dict__.setdefault(_ENCODINGS, {})[name] = encoding
    empty = torch.empty(encoding.row_shape, dtype=torch.uint8, device="meta")
    own_parameters(module)[name] = nn.Parameter(empty, requires_grad=False)
    mark(module)


def mark(module: nn.Module) -> None:
    """Set the attributes of quantized weights that PEFT reads from stock ones."""
    for name, encoding in encodings_of(module).items():
        vars(own_parameters(module)[name]).update(encoding.marks())


@contextmanager
def shown_decoded(model: nn.Module) -> Iterator[None]:
    """Replace quantized experts inside the `with` block by meta parameters of the decoded shape, for PEFT."""
    kept = []
    for module in model.modules():
        for name, encoding in encodings_of(module).items():
            if name != "weight":
                kept.append((module, name, own_parameters(module)[name]))
                empty = torch.empty(encoding.shape, dtype=encoding.dtype, device="meta")
                own_parameters(module)[name] = nn.Parameter(empty, requires_grad=False)
    try:
        yield
    finally:
        for module, name, quantized in kept:
            own_parameters(module)[name] = quantized


def read_quantized(
    module: nn.Module,
    name: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the values ``[matrices, rows, columns]`` of a quantized parameter, whose bytes must be gathered."""
    parameter: Any = own_parameters(module)[name]
    return encodings_of(module)[name].decode(parameter, dtype)
