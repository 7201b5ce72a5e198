"""Reuse pinned host buffers, copy from and to a device on separate streams, and pack many tensors into one buffer.

A copy into a buffer waits on the event of the last copy that read the buffer, and a reader waits for the copy that
filled it. On a CPU device the copies run synchronously in plain memory, and the streams do nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._compat.torch_device import device_module, pinned_bytes

# A tensor reuses a buffer of at most this times the tensor's size. All buffers together have at most this times the
# peak use.
_SPARE = 1.25
_ALIGNED = 256  # bytes

Form = tuple[Sequence[int], torch.dtype]  # the shape and dtype of a tensor
Item = TypeVar("Item")


class HostBuffers:
    """Hold pinned host buffers for one device, and two streams for copies: from the device to the host
    (:attr:`outward`), and from the host to the device (:attr:`inward`).

    A buffer is as large as its first tensor, while torch's own pinned memory rounds up to a power of two. When all
    buffers are together more than a quarter larger than the most that were in use at once, free buffers are released,
    the oldest first.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.module, self.total, self.most = device, device_module(device), 0, 0
        self.outward, self.inward = self.module.Stream(device), self.module.Stream(device)
        self._free: list[
            tuple[Tensor, Any]
        ] = []  # free buffers, each with the event of the last copy that read it; the oldest first

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least ``size`` bytes. Copies from the device into it wait until its last reader has
        finished.
        """
        sizes = [(len(each), place) for place, (each, _) in enumerate(self._free)]
        if fitting := [each for each in sizes if size <= each[0] <= _SPARE * size]:
            buffer, read = self._free.pop(min(fitting)[1])
            self.outward.wait_event(read)
        else:
            buffer = pinned_bytes(size, self.device)
            self.total = self.total + size
        self.most = max(
            self.most,
            self.total - sum(len(each) for each, _ in self._free),
        )
        while self._free and self.total > _SPARE * self.most:
            old, read = self._free.pop(0)
            read.synchronize()
            self.total -= len(old)
        return buffer

    def give(self, buffer: Tensor, read: Any) -> None:
        """Take back a buffer for reuse after the event ``read``, which is recorded after the last copy out of it;
        callable on any thread.
        """
        self._free.append((buffer, read))

    def copy_out(self, targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """Start copying the device's ``tensors`` into ``targets`` on the host; return an event that is recorded after
        the copies.
        """
        self.outward.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.outward):
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            return self.mark(self.outward)

    def mark(self, stream: Any) -> Any:
        """Return an event that occurs when the work queued on ``stream`` so far is done."""
        event = self.module.Event()
        event.record(stream)
        return event


@cache
def buffers_of(device: torch.device) -> HostBuffers:
    """Return the host buffers for a device; there is one :class:`HostBuffers` per device."""
    return HostBuffers(device)


def bytes_before(forms: Sequence[Form]) -> list[int]:
    """Return the byte offset of each tensor in one buffer and, as the last entry, the buffer's size. ``forms`` are the
    shapes and dtypes of the tensors.
    """
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in forms]
    return list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))


def views_of(flat: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """Return the tensors that are stored one after the other in a buffer of bytes, as views. ``forms`` are their shapes
    and dtypes.
    """
    return [
        flat[start : start + prod(shape) * dtype.itemsize].view(dtype).view(torch.Size(shape))
        for start, (shape, dtype) in zip(bytes_before(forms), forms, strict=False)
    ]


def in_one_buffer(
    tensors: Sequence[Tensor],
    forms: Sequence[Form],
    pin_memory: bool = False,
) -> Tensor:
    """Copy tensors one after the other into a new buffer of bytes on their device; each is cast to the dtype in
    ``forms``, which are shapes and dtypes.
    """
    size = bytes_before(forms)[-1]
    device = tensors[0].device
    flat = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    for view, tensor in zip(views_of(flat, forms), tensors, strict=True):
        view.copy_(tensor)
    return flat


def buckets(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Divide ``items`` into groups of consecutive items with at most ``most`` bytes together; a larger item is a group
    of its own.
    """
    bucket = list[Item]()
    filled = 0
    for item in items:
        size = size_of(item)
        if bucket and filled + size > most:
            yield bucket
            bucket = []
            filled = 0
        bucket.append(item)
        filled += size
    if bucket:
        yield bucket
