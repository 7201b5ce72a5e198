"""Define variants of bitsandbytes' linear modules whose quantized weights and scales FSDP2 can shard as plain
parameters.

Import this module only when it is needed: its classes derive from classes of bitsandbytes.
"""

from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn

from ..._compat.bitsandbytes import multiplies_values, product_in_8_bits
from ..._compat.torch import own_parameters
from ...distributed.ops.four_bit import FourBitEncoding, quantization_state, split_row
from ...distributed.ops.grouped_linear import frozen_linear
from ...distributed.ops.quantized_weights import (
    as_bytes,
    encodings_of,
    read_quantized,
    register_quantized,
)

bnb: Any = bitsandbytes  # its annotations are incomplete


class ShardedLinear4bit(bnb.nn.Linear4bit):
    """Compute like bitsandbytes' ``Linear4bit`` (QLoRA, Dettmers et al. 2023), with the same attributes, but with a
    weight of sharded bytes: ``weight`` is ``uint8 [data ranks, bytes]``, see :mod:`...distributed.ops.four_bit`.
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
        by_values = multiplies_values(x) and encodings_of(self)["weight"].dtype == x.dtype
        return frozen_linear(x, bias, self._product, self._read, by_values).to(given)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        encoding = encodings_of(self)["weight"]
        assert isinstance(encoding, FourBitEncoding)
        if not encoding.is_one_stream:
            return nn.functional.linear(x, read_quantized(self, "weight", x.dtype)[0], bias)
        if encoding.decodes_rows_apart(x.device) and multiplies_values(x):
            return nn.functional.linear(x, self._read(x.dtype), bias)
        weight, state = quantization_state(*split_row(self.weight, encoding), encoding)
        return bnb.matmul_4bit(x, weight, quant_state=state, bias=bias)

    def _read(self, dtype: torch.dtype) -> Tensor:
        return read_quantized(self, "weight")[0].to(dtype)


def shard_4bit(module: Any, encoding: FourBitEncoding) -> None:
    """Convert a stock ``Linear4bit`` in place into a :class:`ShardedLinear4bit` with parameters on the meta device."""
    module.__class__ = ShardedLinear4bit
    module.quant_state = None
    register_quantized(module, "weight", encoding)


class ShardedLinear8bitLt(bnb.nn.Linear8bitLt):
    """Compute like bitsandbytes' ``Linear8bitLt`` (LLM.int8(), Dettmers et al. 2022) with sharded rows. Data ranks
    shard the rows of ``weight``, ``int8 [out, in]``, and of ``scales``, ``uint8 [out, 4]``: the bytes of one float32
    per row.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Project ``x [..., in]`` to ``[..., out]``, in the dtype of ``x``."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return frozen_linear(x, bias, self._product, self._read)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return product_in_8_bits(self, x, _rows(self.weight), float_scales(self.scales), bias)

    def _read(self, dtype: torch.dtype) -> Tensor:
        scales = float_scales(self.scales).unsqueeze(1).mul(1.0 / 127.0)
        return _rows(self.weight).to(dtype, copy=True).mul_(scales)


def _rows(weight: Tensor) -> Tensor:
    plain = weight.detach()
    return plain if plain.dtype == torch.int8 else plain.to(torch.int8)


def float_scales(scales: Tensor) -> Tensor:
    """Return the float32 scales ``[rows]`` from their bytes ``[rows, 4]``."""
    return as_bytes(scales).contiguous().view(torch.float32).view(-1)


def shard_8bit(module: Any) -> None:
    """Convert a stock ``Linear8bitLt`` in place into a :class:`ShardedLinear8bitLt` with parameters on the meta
    device.
    """
    module.__class__ = ShardedLinear8bitLt
    empty_parameters(module)


def empty_parameters(module: Any) -> None:
    """Set parameters of a :class:`ShardedLinear8bitLt` to meta tensors, with the sizes before sharding by data
    ranks.
    """
    weight = torch.empty(
        (module.out_features, module.in_features),
        dtype=torch.int8,
        device="meta",
    )
    scales = torch.empty((module.out_features, 4), dtype=torch.uint8, device="meta")
    own_parameters(module)["weight"] = nn.Parameter(weight, requires_grad=False)
    own_parameters(module)["scales"] = nn.Parameter(scales, requires_grad=False)
