"""Pinned buffers in the host's memory that are used again, streams for copies both ways, and many tensors in one.

A copy into a buffer waits, by an event, for the copy that read it last; whoever reads a buffer waits for the copy that
filled it. On a CPU the same copies are made at once, in plain memory: its streams do nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._compat.torch_device import device_module, pinned_bytes

_SPARE = 1.25  # a tensor takes a buffer that is larger by this at most, and all buffers are of what was needed
_ALIGNED = 256  # bytes

Form = tuple[Sequence[int], torch.dtype]  # of a tensor: shape and dtype
Item = TypeVar("Item")


class HostBuffers:
    """Hold pinned buffers for copies from a device, and its streams outward and inward.

    A buffer is as large as its first tensor, not rounded up to a power of two as torch's own pinned memory is; free
    ones go, the oldest first, while all together are more than a quarter larger than the most that was needed at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.module, self.total, self.most = device, device_module(device), 0, 0
        self.outward, self.inward = self.module.Stream(device), self.module.Stream(device)
        self._free: list[
            tuple[Tensor, Any]
        ] = []  # and the event of the copy that read it last; the oldest first

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least ``size`` bytes; what is written to it outward waits for its last reader."""
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
        """Take back a buffer that the copy before the event ``read`` reads last; on any thread."""
        self._free.append((buffer, read))

    def copy_out(self, targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """Begin to copy tensors of the device into memory of the host; return the event of its end."""
        self.outward.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.outward):
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            return self.mark(self.outward)

    def mark(self, stream: Any) -> Any:
        """Return an event behind what was asked of a stream so far."""
        event = self.module.Event()
        event.record(stream)
        return event


@cache
def buffers_of(device: torch.device) -> HostBuffers:
    """Return the buffers of a device."""
    return HostBuffers(device)


def bytes_before(forms: Sequence[Form]) -> list[int]:
    """Return where each of several tensors begins in one buffer, and at last the size of the buffer."""
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in forms]
    return list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))


def views_of(flat: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """Return the tensors that lie in a buffer of bytes, one after the other."""
    return [
        flat[start : start + prod(shape) * dtype.itemsize].view(dtype).view(torch.Size(shape))
        for start, (shape, dtype) in zip(bytes_before(forms), forms, strict=False)
    ]


def in_one_buffer(
    tensors: Sequence[Tensor],
    forms: Sequence[Form],
    pin_memory: bool = False,
) -> Tensor:
    """Return the bytes of tensors, all of one device, in one buffer there; cast to the dtypes of ``forms``."""
    size = bytes_before(forms)[-1]
    device = tensors[0].device
    flat = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    for view, tensor in zip(views_of(flat, forms), tensors, strict=True):
        view.copy_(tensor)
    return flat


def buckets(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Split items into runs of consecutive ones, of at most ``most`` bytes together, or of one that is larger."""
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
