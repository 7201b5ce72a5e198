"""Keep saved tensors on the CPU while nobody reads them, in pinned buffers that layers and steps reuse.

::

    compute   | layer 1     | layer 2     | ...   | backward of 2      | backward of 1
    outward   |             | 1 -> buffer | 2 -> buffer              |
    inward    |                         ... buffer -> 2 | buffer -> 1 |

A copy out begins when the layer has saved the tensor and runs under what is computed next; a copy back begins when the
backward pass of the layer behind begins, and runs under it. Each direction has a stream, so both run at once. Who waits
for whom, by events::

    outward waits for   compute, which fills the tensor, and for the copy back that last read the buffer
    inward waits for    the copy out that filled the buffer
    compute waits for   the copy back, when the tensor is read

A buffer is free once its tensor has been read for the last time. It is as large as its first tensor, not rounded up to
a power of two as torch's own pinned memory is; free ones go, the oldest first, while all together are more than a
quarter larger than the most that was ever needed at once. On a CPU the same copies are made at once.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..._compat.torch_device import device_module, is_accelerator, keep_for_stream, pinned_bytes
from .compressed import Stored

_SPARE = 1.25  # a tensor takes a buffer that is larger by this at most, and all buffers are of what was needed


class HostBuffers:
    """Hold the pinned buffers of a device, and its streams outward and inward."""

    def __init__(self, device: torch.device) -> None:
        self.module, self.total, self.most = device_module(device), 0, 0
        self.outward, self.inward = self.module.Stream(device), self.module.Stream(device)
        self._free: list[tuple[Tensor, Any]] = []  # and the event of the copy that read it last; the oldest first

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least ``size`` bytes; what is written to it outward waits for its last reader."""
        sizes = [(len(each), place) for place, (each, _) in enumerate(self._free)]
        if fitting := [each for each in sizes if size <= each[0] <= _SPARE * size]:
            buffer, read = self._free.pop(min(fitting)[1])
            self.outward.wait_event(read)
        else:
            buffer, self.total = pinned_bytes(size), self.total + size
        self.most = max(self.most, self.total - sum(len(each) for each, _ in self._free))
        while self._free and self.total > _SPARE * self.most:
            old, read = self._free.pop(0)
            read.synchronize()
            self.total -= len(old)
        return buffer

    def give(self, buffer: Tensor, read: Any) -> None:
        """Take back a buffer that the copy before the event ``read`` reads last; on any thread."""
        self._free.append((buffer, read))


@cache
def buffers_of(device: torch.device) -> HostBuffers:
    """Return the buffers of a device."""
    return HostBuffers(device)


class OnHost(Stored):
    """Keep a saved tensor on the CPU until its readers have read it."""

    def __init__(self, tensor: Tensor) -> None:
        self.readers, self.device = 0, tensor.device
        self.size = tensor.numel() * tensor.element_size()
        self._here: Tensor | None = None
        self._copied: Any = None
        self._buffer: Tensor | None = None
        if not is_accelerator(tensor.device):
            self._host = tensor.detach().clone()
            return
        lanes = buffers_of(tensor.device)
        buffer = lanes.take(self.size)
        self._host = buffer[: self.size].view(tensor.dtype).view(tensor.shape)
        lanes.outward.wait_stream(lanes.module.current_stream(tensor.device))
        with lanes.module.stream(lanes.outward):
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._copied = lanes.outward.record_event()
        keep_for_stream(tensor, lanes.outward)
        self._buffer = buffer

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._here is not None or not self.readers:
            return
        if not is_accelerator(self.device):
            self._here = self._host.clone()
            return
        lanes = buffers_of(self.device)
        with lanes.module.stream(lanes.inward):
            lanes.inward.wait_event(self._copied)
            self._here = torch.empty_like(self._host, device=self.device).copy_(self._host, non_blocking=True)
            self._copied = lanes.inward.record_event()

    def read(self) -> Tensor:
        """Return the tensor, on its device; the last reader frees it there."""
        self.readers = max(self.readers, 1)  # with retain_graph it is read again
        self.fetch()
        found = self._here
        assert found is not None
        if is_accelerator(self.device):
            current = device_module(self.device).current_stream(self.device)
            current.wait_event(self._copied)
            keep_for_stream(found, current)
        self.readers -= 1
        if not self.readers:
            self._here = None
        return found

    def __del__(self) -> None:
        if self._buffer is not None:
            buffers_of(self.device).give(self._buffer, self._copied)
