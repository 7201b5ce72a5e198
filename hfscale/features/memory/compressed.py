"""Blockwise 8-bit compression of tensors, by bitsandbytes' kernels (Dettmers et al. 2022).

For activations saved for the backward pass: Jain et al. 2018 (Gist); Chakrabarti and Moseley 2019.

::

    x [n] --by blocks of 256: largest entry, nearest of 256 values--> codes [n] of one byte, scales [n / 256] of four

Signs and zeros are exact: a nonzero entry that would be rounded to zero, or change sign, takes the smallest value of
its sign, and zeros stay zero (the CPU kernels are off by some 3e-5 of a block's largest entry there). So ReLU's masks
are those of the uncompressed tensor, and so are those of dropout, whose entries are all zero or the largest one.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..._compat.bitsandbytes import functional
from ...distributed.ops.fused import fused
from ...plan.feature_plans import BLOCK


class Stored:
    """Keep a saved tensor of ``size`` bytes, unchanged; ``readers`` saved references to it have not been read."""

    def __init__(self, tensor: Tensor) -> None:
        self.readers, self.size, self._tensor = 0, tensor.numel() * tensor.element_size(), tensor

    def fetch(self) -> None:
        """Begin to bring it back."""

    def read(self) -> Tensor:
        """Return the tensor, on its device."""
        return self._tensor


class Compressed(Stored):
    """Keep a saved tensor in 8 bits; ``keep`` stores codes and scales, in place or offloaded."""

    def __init__(self, tensor: Tensor, keep: Callable[[Tensor], Stored]) -> None:
        self.readers, self._shape, self._dtype = 0, tensor.shape, tensor.dtype
        codes, scales = compress(tensor)
        self._codes, self._scales = keep(codes), keep(scales)
        self.size = self._codes.size + self._scales.size

    def fetch(self) -> None:
        """Begin to bring back codes and scales."""
        for part in (self._codes, self._scales):
            part.readers = max(part.readers, 1)
            part.fetch()

    def read(self) -> Tensor:
        """Return the decompressed tensor."""
        return decompress(self._codes.read(), self._scales.read(), self._dtype).view(self._shape)


def compress(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compress a floating-point tensor ``[...]`` to codes ``[n]`` and scales ``[n / 256]``."""
    flat = x.detach().reshape(-1)
    flat = flat.float() if flat.dtype == torch.float64 else flat
    values, zero = _values(x.device)
    codes, state = functional().quantize_blockwise(flat, code=values, blocksize=BLOCK)
    return _with_signs(codes, flat, zero), state.absmax


@fused
def _with_signs(codes: Tensor, x: Tensor, zero: int) -> Tensor:
    """Return the codes with the signs of ``x``."""
    signs, found = x.sign().to(torch.int16), (codes.to(torch.int16) - zero).sign()
    return torch.where(signs == found, codes, (signs + zero).to(torch.uint8))


def decompress(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decompress codes and scales to ``[n]`` in ``dtype``."""
    values, _ = _values(codes.device)
    in_between = torch.float32 if dtype == torch.float64 else dtype
    state = functional().QuantState(absmax=scales, code=values, blocksize=BLOCK, dtype=in_between)
    found: Tensor = functional().dequantize_blockwise(codes, state)
    return found.to(dtype)


@cache
def _values(device: torch.device) -> tuple[Any, int]:
    """Return the values of the codes, ascending, and the code of zero."""
    values = functional().create_dynamic_map()
    return values.to(device), int((values == 0).nonzero()[0])
