"""A 4-bit projection whose packed weight is a plain parameter, so that FSDP2 can shard it.

Imported on use: it derives from a class of bitsandbytes.
"""

from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn

from ..._compat.bitsandbytes import drop_state
from ...distributed.ops.four_bit import FourBitPacking, split_row, unpack_state
from ...distributed.ops.grouped_linear import frozen_linear
from ...distributed.ops.packed_weights import packings_of, read_packed, register_packed

bnb: Any = bitsandbytes  # its annotations are incomplete


class ShardedLinear4bit(bnb.nn.Linear4bit):
    """Compute a bitsandbytes ``Linear4bit``, with its attributes and arithmetic, over sharded bytes (QLoRA, Dettmers et
    al. 2023): ``weight`` is ``uint8 [data ranks, bytes]``, see :mod:`...distributed.ops.four_bit`.
    """

    compute_type_is_set: bool

    def forward(self, x: Tensor) -> Tensor:
        """Project ``x [..., in]`` to ``[..., out]``, in the dtype of ``x``."""
        given = x.dtype
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return frozen_linear(x, bias, self._product, self._read).to(given)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        packing = packings_of(self)["weight"]
        assert isinstance(packing, FourBitPacking)
        if not packing.is_one_stream:
            return nn.functional.linear(x, read_packed(self, "weight", x.dtype)[0], bias)
        weight, state = unpack_state(*split_row(self.weight, packing), packing)
        out: Tensor = bnb.matmul_4bit(x, weight, quant_state=state, bias=bias)
        return out

    def _read(self, dtype: torch.dtype) -> Tensor:
        return read_packed(self, "weight")[0].to(dtype)


def make_sharded(module: Any, packing: FourBitPacking) -> None:
    """Turn a stock ``Linear4bit`` into a :class:`ShardedLinear4bit` with parameters on the meta device."""
    module.__class__ = ShardedLinear4bit
    drop_state(module)
    register_packed(module, "weight", packing)
