"""Hold frozen weights as bytes, which data ranks can shard and all-gather like any other tensor.

A quantized parameter is one tensor ``uint8 [shards, bytes]``. Data rank ``s`` read or quantized row ``s``, which holds
everything needed to compute the values of its shard. All data ranks compute with the gathered rows, which an immutable
:class:`Encoding`, kept in the module next to the parameter, decodes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..._compat.replaced import entries_replaced
from ..._compat.torch import own_parameters

_ENCODINGS = "_encodings"


@dataclass(frozen=True)
class Encoding(ABC):
    """Describe how to decode a quantized weight."""

    # ``[matrices, rows, columns]`` of the gathered weight; a projection is one matrix.
    shape: tuple[int, int, int]
    dtype: torch.dtype  # the dtype of the decoded values
    # dtype in which experts compute; ``None`` for the dtype of their input. Projections have their own setting instead.
    compute_dtype: torch.dtype | None

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, int]:
        """The shape of the gathered bytes, ``(data ranks, bytes per rank)``."""

    @abstractmethod
    def decode(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values ``[matrices, rows, columns]`` of the gathered bytes, by default in :attr:`dtype`."""

    def marks(self) -> Mapping[str, Any]:
        """Return the attributes, name -> value, that PEFT reads from a parameter in this quantization format."""
        return {}


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the local bytes of a parameter as plain uint8.

    Mixed precision may have cast them to floats, which is exact: bfloat16 represents 0 to 255.
    """
    plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return plain.to(torch.uint8)


def gathered(tensor: Tensor) -> Tensor:
    """Return the bytes of a quantized parameter of all data ranks, one row per rank; they are all-gathered if
    necessary, so every data rank must call this.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def encodings_of(module: nn.Module) -> dict[str, Encoding]:
    """Return the encodings of a module's quantized parameters, by name."""
    return module.__dict__.get(_ENCODINGS, {})


def register_quantized(module: nn.Module, name: str, encoding: Encoding) -> None:
    """Register in ``module`` a quantized parameter ``name`` on the meta device, whose bytes ``encoding`` decodes."""
    module.__dict__.setdefault(_ENCODINGS, {})[name] = encoding
    empty = torch.empty(encoding.row_shape, dtype=torch.uint8, device="meta")
    own_parameters(module)[name] = nn.Parameter(empty, requires_grad=False)
    mark(module)


def mark(module: nn.Module) -> None:
    """Set on a module's quantized parameters the attributes that PEFT reads from the parameters of the library that
    defines the quantization format.
    """
    for name, encoding in encodings_of(module).items():
        vars(own_parameters(module)[name]).update(encoding.marks())


def shown_decoded(model: nn.Module) -> AbstractContextManager[None]:
    """Replace quantized experts by meta parameters of the decoded shape inside the ``with`` block, for PEFT to read."""
    shown = []
    for module in model.modules():
        for name, encoding in encodings_of(module).items():
            if name != "weight":
                empty = torch.empty(encoding.shape, dtype=encoding.dtype, device="meta")
                decoded = nn.Parameter(empty, requires_grad=False)
                shown.append((own_parameters(module), name, decoded))
    return entries_replaced(shown)


def read_quantized(
    module: nn.Module,
    name: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the values ``[matrices, rows, columns]`` of a quantized parameter, whose bytes must be gathered."""
    parameter: Any = own_parameters(module)[name]
    return encodings_of(module)[name].decode(parameter, dtype)
