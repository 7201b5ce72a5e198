"""Keep saved tensors until their backward pass: unchanged, in 8 bits, or on the CPU.

*In 8 bits*: tensors are quantized blockwise by bitsandbytes' kernels (Dettmers et al. 2022). Compressed activations
were proposed by Jain et al. 2018 (Gist), and Chakrabarti and Moseley 2019::

    x [n] --by blocks of 256: largest entry, nearest of 256 values--> codes [n], 1 byte; scales [n / 256], 4 bytes

Signs and zeros are exact: a nonzero entry that would be rounded to zero, or change its sign, gets the smallest value of
its sign, and zeros stay zero (without this, the CPU kernels are off by about 3e-5 of a block's largest entry). ReLU's
masks are therefore those of the uncompressed tensor. Dropout's masks are exact too, since each of their entries is
zero or the largest entry.

*On the CPU*: tensors are copied to pinned buffers, which later layers and steps reuse::

    compute   | layer 1     | layer 2     | ...   | backward of 2      | backward of 1
    outward   |             | 1 -> buffer | 2 -> buffer              |
    inward    |                         ... buffer -> 2 | buffer -> 1 |

A copy to the CPU begins when the layer saves the tensor, and overlaps with the following computation. A copy back to
the device begins when the backward pass of the next layer begins, and overlaps with that backward pass. Each direction
has a stream, so both directions overlap. Streams wait for events::

    outward waits for   compute, which fills the tensor, and for the copy back that last read the buffer
    inward waits for    the copy to the CPU that filled the buffer
    compute waits for   the copy back, when the tensor is read

A buffer is free after its tensor has been read for the last time (:class:`HostBuffers`). If the device is a CPU, the
same copies are made synchronously.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..._compat.bitsandbytes import functional
from ..._compat.torch_device import is_accelerator, keep_for_stream
from ...distributed.host_buffers import buffers_of, views_of
from ...distributed.ops.fused import fused
from ...plan.feature_plans import BLOCK


class Stored:
    """Keep a saved tensor unchanged. ``size`` is its number of bytes; ``readers`` counts the saved references to the
    tensor that the backward pass has not read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.readers, self.size, self._tensor = 0, tensor.numel() * tensor.element_size(), tensor

    def fetch(self) -> None:
        """Do nothing, since the tensor is already on its device; subclasses begin to copy it back."""

    def read(self) -> Tensor:
        """Return the tensor, on its device."""
        return self._tensor


class OnHost(Stored):
    """Keep a saved tensor on the CPU until all ``readers`` have read it."""

    def __init__(self, tensor: Tensor) -> None:
        self.readers = 0
        self.device = tensor.device
        self.size = tensor.numel() * tensor.element_size()
        self._here: Tensor | None = None
        self._copied: Any = None
        self._buffer: Tensor | None = None
        if not is_accelerator(tensor.device):
            self._host = tensor.detach().clone()
            return
        lanes = buffers_of(tensor.device)
        self._buffer = lanes.take(self.size)
        (self._host,) = views_of(self._buffer, [(tensor.shape, tensor.dtype)])
        self._copied = lanes.copy_out([self._host], [tensor.detach()])
        keep_for_stream(tensor, lanes.outward)

    def fetch(self) -> None:
        """Begin to copy the tensor back to its device."""
        if self._here is not None or not self.readers:
            return
        if not is_accelerator(self.device):
            self._here = self._host.clone()
            return
        lanes = buffers_of(self.device)
        with lanes.module.stream(lanes.inward):
            lanes.inward.wait_event(self._copied)
            self._here = torch.empty_like(self._host, device=self.device).copy_(
                self._host, non_blocking=True
            )
            self._copied = lanes.mark(lanes.inward)

    def read(self) -> Tensor:
        """Return the tensor on its device. After the last reader, the copy on the device is freed."""
        self.readers = max(self.readers, 1)  # with retain_graph the tensor is read again
        self.fetch()
        tensor = self._here
        assert tensor is not None
        if is_accelerator(self.device):
            current = buffers_of(self.device).module.current_stream(self.device)
            current.wait_event(self._copied)
            keep_for_stream(tensor, current)
        self.readers -= 1
        if not self.readers:
            self._here = None
        return tensor

    def __del__(self) -> None:
        if self._buffer is not None:
            buffers_of(self.device).give(self._buffer, self._copied)


class Compressed(Stored):
    """Keep a saved tensor in 8 bits. ``keep`` stores codes and scales: :class:`Stored`, or :class:`OnHost`."""

    def __init__(self, tensor: Tensor, keep: Callable[[Tensor], Stored]) -> None:
        self.readers = 0
        self._shape = tensor.shape
        self._dtype = tensor.dtype
        codes, scales = compress(tensor)
        self._codes, self._scales = keep(codes), keep(scales)
        self.size = self._codes.size + self._scales.size

    def fetch(self) -> None:
        """Begin to copy codes and scales back to the device."""
        for part in (self._codes, self._scales):
            part.readers = max(part.readers, 1)
            part.fetch()

    def read(self) -> Tensor:
        """Return the decompressed tensor."""
        return decompress(
            self._codes.read(),
            self._scales.read(),
            self._dtype,
        ).view(self._shape)


def compress(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compress a floating-point tensor ``[...]`` to codes ``[n]`` and scales ``[n / 256]``."""
    flat = x.detach().reshape(-1)
    flat = flat.float() if flat.dtype == torch.float64 else flat
    values, zero = _values(x.device)
    codes, state = functional().quantize_blockwise(flat, code=values, blocksize=BLOCK)
    return _with_signs(codes, flat, zero), state.absmax


@fused
def _with_signs(codes: Tensor, x: Tensor, zero: int) -> Tensor:
    """Return ``codes``, changed where their values would not have the sign of ``x``."""
    signs = x.sign().to(torch.int16)
    rounded = (codes.to(torch.int16) - zero).sign()
    return torch.where(signs == rounded, codes, (signs + zero).to(torch.uint8))


def decompress(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decompress codes and scales to ``[n]`` in ``dtype``."""
    values, _ = _values(codes.device)
    in_between = torch.float32 if dtype == torch.float64 else dtype
    state = functional().QuantState(absmax=scales, code=values, blocksize=BLOCK, dtype=in_between)
    widened: Tensor = functional().dequantize_blockwise(codes, state)
    return widened.to(dtype)


@cache
def _values(device: torch.device) -> tuple[Any, int]:
    """Return the 256 values that codes stand for, ascending, and the code of zero."""
    values = functional().create_dynamic_map()
    return values.to(device), int((values == 0).nonzero()[0])
