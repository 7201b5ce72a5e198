"""A tensor in 8 bits, blockwise, by bitsandbytes' kernels (Dettmers et al. 2022).

For what the backward pass reads: Jain et al. 2018 (Gist); Chakrabarti and Moseley 2019.

::

    x [n] --by blocks of 256: largest entry, nearest of 256 values--> codes [n] of one byte, scales [n / 256] of four

Signs and zeros are exact: what is rounded to zero, or over it, takes the smallest value of its sign, and zeros are
zero (the kernels for CPUs are off by some 3e-5 of a block's largest entry there). So ReLU's masks are those of the
uncompressed tensor, and so are those of dropout, whose entries are all zero or the largest one.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from .._host.bitsandbytes import functional
from ..plan.compress import BLOCK


class Stored(Protocol):
    """A tensor that is kept in another form, or in another place.

    Attributes:
        readers: how many saved references to it have not been read.
        size: bytes that it takes there.
    """

    readers: int
    size: int

    def fetch(self) -> None:
        """Begin to bring it back."""

    def read(self) -> Tensor:
        """The tensor, on its device."""


class Here:
    """A tensor that stays as it is: see :class:`Stored`."""

    def __init__(self, tensor: Tensor) -> None:
        self.readers, self.size, self._tensor = 0, tensor.numel() * tensor.element_size(), tensor

    def fetch(self) -> None:
        """It is here."""

    def read(self) -> Tensor:
        """As it is."""
        return self._tensor


class Compressed:
    """A tensor of any shape in 8 bits: see :class:`Stored`.

    Args:
        keep: where codes and scales are kept.
    """

    def __init__(self, tensor: Tensor, keep: Callable[[Tensor], Stored]) -> None:
        self.readers, self._shape, self._dtype = 0, tensor.shape, tensor.dtype
        codes, scales = compress(tensor)
        self._codes, self._scales = keep(codes), keep(scales)
        self.size = self._codes.size + self._scales.size

    def fetch(self) -> None:
        """Codes and scales."""
        for part in (self._codes, self._scales):
            part.readers = max(part.readers, 1)
            part.fetch()

    def read(self) -> Tensor:
        """The tensor, rounded."""
        found = decompress(self._codes.read(), self._scales.read(), self._dtype)
        return found.view(self._shape)


def compress(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[...]`` of rounding numbers -> codes ``[n]`` and scales ``[n / 256]``."""
    flat = x.detach().reshape(-1)
    flat = flat.float() if flat.dtype == torch.float64 else flat
    values, zero = _values(x.device)
    codes, state = functional().quantize_blockwise(flat, code=values, blocksize=BLOCK)
    signs, found = flat.sign().to(torch.int16), codes.to(torch.int16).sub_(zero).sign_()
    return torch.where(signs == found, codes, (signs + zero).to(torch.uint8)), state.absmax


def decompress(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``[n]`` in ``dtype``."""
    values, _ = _values(codes.device)
    in_between = torch.float32 if dtype == torch.float64 else dtype
    state = functional().QuantState(absmax=scales, code=values, blocksize=BLOCK, dtype=in_between)
    found: Tensor = functional().dequantize_blockwise(codes, state)
    return found.to(dtype)


@lru_cache(maxsize=8)
def _values(device: torch.device) -> tuple[Any, int]:
    """What the codes mean, ascending, and which of them is zero."""
    values = functional().create_dynamic_map()
    return values.to(device), int((values == 0).nonzero()[0])
