"""Offloaded tensors: pinned CPU memory and a separate CUDA stream on a GPU, a plain copy on a CPU."""

from typing import Any

import torch
from torch import Tensor

from ..._compat.torch_device import device_module, is_accelerator, keep_for_stream


class OnHost:
    """A tensor that is offloaded to the CPU: see :class:`.compressed.Stored`.

    Attributes:
        readers: how many saved references to it have not been read.
        size: its bytes.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.readers, self.device = 0, tensor.device
        self.size = tensor.numel() * tensor.element_size()
        self._here: Tensor | None = None
        self._copied: Any = None
        if not is_accelerator(tensor.device):
            self._host = tensor.detach().clone()
            return
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream = _stream(tensor.device)
        stream.wait_stream(device_module(tensor.device).current_stream(tensor.device))
        with device_module(tensor.device).stream(stream):
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._copied = stream.record_event()
        keep_for_stream(tensor, stream)

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._here is not None or not self.readers:
            return
        if not is_accelerator(self.device):
            self._here = self._host.clone()
            return
        stream = _stream(self.device)
        with device_module(self.device).stream(stream):
            stream.wait_event(self._copied)
            self._here = self._host.to(self.device, non_blocking=True)
            self._copied = stream.record_event()

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


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = device_module(device).Stream(device)
    return _streams[device]
