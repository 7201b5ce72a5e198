"""A projection whose frozen weight stays in the bytes that its checkpoint stores."""

import torch
from torch import Tensor, nn

from ...distributed.ops.grouped_linear import frozen_linear
from ...distributed.ops.packed_weights import Packing, read_packed, register_packed
from ...train.runtime.parameter_names import owner_of


class StoredLinear(nn.Linear):
    """Compute an ``nn.Linear`` of packed bytes: ``weight``, ``uint8 [data ranks, bytes]``, is unpacked in each pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Project ``x [..., in]`` to ``[..., out]``."""
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # which it leaves alone
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return frozen_linear(x, None if self.bias is None else self.bias.to(x.dtype), self._product, self._read)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, self._read(x.dtype), bias)

    def _read(self, dtype: torch.dtype) -> Tensor:
        return read_packed(self, "weight", dtype)[0]


def hold_packed(model: nn.Module, name: str, packing: Packing) -> None:
    """Let the module of the parameter ``name`` compute with packed bytes; the parameter is on the meta device."""
    module, attribute = owner_of(model, name)
    if isinstance(module, nn.Linear):
        module.__class__ = StoredLinear
    register_packed(module, attribute, packing)
