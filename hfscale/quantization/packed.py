"""Parameters of a module that hold a weight in 4 bits as plain bytes: see :mod:`.four_bit`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._host.torch import own_parameters
from .four_bit import Packing, unpack

_PACKINGS = "_packings"
_SCALES = "scales"


def packings_of(module: nn.Module) -> dict[str, Packing]:
    """The parameters of ``module`` that hold packed bytes, by name; beside each are its scales: :func:`scales_name`."""
    found: dict[str, Packing] = module.__dict__.get(_PACKINGS, {})
    return found


def scales_name(name: str) -> str:
    """The parameter beside a packed one that holds its scales."""
    return _SCALES if name == "weight" else f"{name}_{_SCALES}"


def register_packed(module: nn.Module, name: str, packing: Packing) -> None:
    """Give ``module`` a packed parameter ``name`` and its scales, on the meta device."""
    module.__dict__.setdefault(_PACKINGS, {})[name] = packing
    for key, shape in ((name, packing.weight_shape), (scales_name(name), packing.scales_shape)):
        empty = torch.empty(shape, dtype=torch.uint8, device="meta")
        own_parameters(module)[key] = nn.Parameter(empty, requires_grad=False)
    mark(module)


def forget_packed(module: nn.Module, name: str) -> None:
    """Undo :func:`register_packed`; the parameter itself is its caller's to put back."""
    packings_of(module).pop(name, None)
    own_parameters(module).pop(scales_name(name), None)


def mark(module: nn.Module) -> None:
    """Let a packed weight say of itself what adapters ask a stock one for."""
    for name, packing in packings_of(module).items():
        parameter: Any = own_parameters(module)[name]
        parameter.quant_type, parameter.compress_statistics = packing.quant_type, packing.double


@contextmanager
def shown_unpacked(model: nn.Module) -> Iterator[None]:
    """Within: packed experts have a parameter without memory of the unpacked shape, for those who go by it."""
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
    """A packed parameter of ``module`` as ``[matrices, rows, columns]``; its bytes must be gathered now."""
    parameters: Any = own_parameters(module)
    return unpack(parameters[name], parameters[scales_name(name)], packings_of(module)[name], dtype)
