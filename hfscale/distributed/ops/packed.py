"""Access to parameters that hold a 4-bit weight as plain bytes: see :mod:`.four_bit`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.torch import own_parameters
from .four_bit import Packing, unpack

_PACKINGS = "_packings"
_SCALES = "scales"


def packings_of(module: nn.Module) -> dict[str, Packing]:
    """Return the packings of a module's packed parameters, by name; the scales of each are in :func:`scales_name`."""
    found: dict[str, Packing] = module.__dict__.get(_PACKINGS, {})
    return found


def scales_name(name: str) -> str:
    """Return the name of the parameter that holds a packed parameter's scales."""
    return _SCALES if name == "weight" else f"{name}_{_SCALES}"


def register_packed(module: nn.Module, name: str, packing: Packing) -> None:
    """Give ``module`` a packed parameter ``name`` and its scales, on the meta device."""
    module.__dict__.setdefault(_PACKINGS, {})[name] = packing
    for key, shape in ((name, packing.weight_shape), (scales_name(name), packing.scales_shape)):
        empty = torch.empty(shape, dtype=torch.uint8, device="meta")
        own_parameters(module)[key] = nn.Parameter(empty, requires_grad=False)
    mark(module)


def forget_packed(module: nn.Module, name: str) -> None:
    """Undo :func:`register_packed`; the caller puts the original parameter back."""
    packings_of(module).pop(name, None)
    own_parameters(module).pop(scales_name(name), None)


def mark(module: nn.Module) -> None:
    """Set the attributes of packed weights that PEFT reads from stock ones."""
    for name, packing in packings_of(module).items():
        parameter: Any = own_parameters(module)[name]
        parameter.quant_type, parameter.compress_statistics = packing.quant_type, packing.double


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


def read_packed(module: nn.Module, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantize a packed parameter of ``module`` to ``[matrices, rows, columns]``; its bytes must be gathered."""
    parameters: Any = own_parameters(module)
    return unpack(parameters[name], parameters[scales_name(name)], packings_of(module)[name], dtype)
