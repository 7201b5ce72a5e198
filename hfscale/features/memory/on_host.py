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

A buffer is free once its tensor has been read for the last time (:class:`HostBuffers`). On a CPU the same copies are
made at once.
"""

from typing import Any

import torch
from torch import Tensor

from ..._compat.torch_device import is_accelerator, keep_for_stream
from ...distributed.host_buffers import buffers_of, views_of
from .compressed import Stored


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
        self._buffer = lanes.take(self.size)
        (self._host,) = views_of(self._buffer, [(tensor.shape, tensor.dtype)])
        self._copied = lanes.copy_out([self._host], [tensor.detach()])
        keep_for_stream(tensor, lanes.outward)

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
            self._copied = lanes.mark(lanes.inward)

    def read(self) -> Tensor:
        """Return the tensor, on its device; the last reader frees it there."""
        self.readers = max(self.readers, 1)  # with retain_graph it is read again
        self.fetch()
        found = self._here
        assert found is not None
        if is_accelerator(self.device):
            current = buffers_of(self.device).module.current_stream(self.device)
            current.wait_event(self._copied)
            keep_for_stream(found, current)
        self.readers -= 1
        if not self.readers:
            self._here = None
        return found

    def __del__(self) -> None:
        if self._buffer is not None:
            buffers_of(self.device).give(self._buffer, self._copied)
