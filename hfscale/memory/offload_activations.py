"""Offload of activations as a part: what layers keep for their backward pass waits on the host.

::

    forward   layer 1 --copy--> host    layer 2 --copy--> host    ...            copies beside the computation
    backward                            layer 2 <--copy-- host   layer 1 <-- fetched while layer 2 computes

Saved-tensor hooks around each layer, outside of what is recomputed: of a layer that is recomputed, its input is copied.
What is a parameter, or smaller than the size that was asked, stays. A tensor that several operations keep is copied
once. On a CPU the same copies are made, one after the other.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .._host.torch import own_buffers, own_parameters, storage_key, version_of
from ..plan.offload import offloaded
from ..runtime import Part, Runtime, local_tensor
from ..runtime.local_weights import LocalWeights


class OffloadActivations(Part):
    """Nothing where it was not asked for. Comes behind recomputation.

    Attributes:
        copied: bytes that were copied to the host so far.
    """

    def __init__(self) -> None:
        self.copied = 0
        self._least: int | None = None
        self._latest: weakref.ref[_Pass] | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Put hooks around the layers."""
        self._least = offloaded(runtime.plan).activations
        if self._least is not None:
            for name in filter(runtime.is_local, runtime.plan.layers):
                self._wrap(runtime.model.get_submodule(name))

    def metrics(self, runtime: Runtime) -> Mapping[str, float]:
        """How much was copied."""
        return {} if self._least is None else {"offloaded_activation_bytes": self.copied}

    def _wrap(self, layer: nn.Module) -> None:
        forward = layer.forward

        def forward_offloading(*args: Any, **kwargs: Any) -> Any:
            if not (layer.training and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            assert self._least is not None
            current = _Pass(layer, self._least, None if self._latest is None else self._latest())
            self._latest = weakref.ref(current)
            with torch.autograd.graph.saved_tensors_hooks(current.pack, current.unpack):
                output = forward(*args, **kwargs)
            self.copied += current.copied
            current.over()
            return output

        forward_offloading.__wrapped__ = forward  # type: ignore[attr-defined]  # the host inspects forward's signature
        layer.forward = forward_offloading  # type: ignore[method-assign]


class _OnHost:
    """A tensor that waits on the host.

    Attributes:
        readers: how many saved references to it have not been read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.readers, self.device = 0, tensor.device
        self._here: Tensor | None = None
        self._copied: Any = None
        if tensor.device.type == "cpu":
            self._host = tensor.detach().clone()
            return
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream = _stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._copied = stream.record_event()
        tensor.record_stream(stream)

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._here is not None or not self.readers:
            return
        if self.device.type == "cpu":
            self._here = self._host.clone()
            return
        stream = _stream(self.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._copied)
            self._here = self._host.to(self.device, non_blocking=True)
            self._copied = stream.record_event()

    def read(self) -> Tensor:
        """The tensor, on its device; given up there with the last reader."""
        self.readers = max(self.readers, 1)  # a graph that is kept is read again
        self.fetch()
        found = self._here
        assert found is not None
        if self.device.type != "cpu":
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._copied)
            found.record_stream(current)
        self.readers -= 1
        if not self.readers:
            self._here = None
        return found


class _Pass:
    """One pass through one layer.

    Args:
        least: bytes of the smallest tensor that is copied.
        before: the pass through a layer that came before this one, while its graph is alive.
    """

    def __init__(self, layer: nn.Module, least: int, before: "_Pass | None") -> None:
        self.copied = 0
        self._least, self._before = least, None if before is None else weakref.ref(before)
        self._stays = {
            storage_key(local_tensor(held.detach()).untyped_storage())
            for module in layer.modules()
            for held in (*own_parameters(module).values(), *own_buffers(module).values())
            if held is not None
        }
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, _OnHost]] = {}
        self._waiting: list[weakref.ref[_OnHost]] = []
        self._read = False

    def over(self) -> None:
        """The layer has kept what it keeps."""
        self._known, self._stays = {}, set()

    def pack(self, tensor: Tensor) -> "_Packed":
        """Called for every tensor that an operation keeps."""
        local, shape, stride = tensor.detach(), tensor.shape, tensor.stride()
        size = local.numel() * local.element_size()
        storage = local.untyped_storage()
        if size < self._least or storage_key(storage) in self._stays or storage.nbytes() < size:
            return self, local, None
        in_order = local.permute(sorted(range(local.ndim), key=lambda dim: stride[dim], reverse=True))
        dense = in_order.is_contiguous()
        if dense:  # all views of the same memory are one copy
            local = in_order.view(-1)
        key = storage_key(storage), local.data_ptr(), local.shape, local.stride(), local.dtype, version_of(tensor)
        alive, found = self._known.get(key, (None, None))
        if found is None or alive is None or alive.expired():
            found = _OnHost(local)
            self._known[key] = StorageWeakRef(storage), found
            self._waiting.append(weakref.ref(found))
            self.copied += size
        found.readers += 1
        return self, found, (shape, stride) if dense else None

    def unpack(self, kept: "_Packed") -> Tensor:
        """Called when the backward pass reads one; the first time, fetching for the layer before begins."""
        _, saved, view = kept
        if isinstance(saved, Tensor):
            return saved
        found = saved.read()
        before = None if self._before is None else self._before()
        if not self._read and before is not None:
            before.fetch()
        self._read = True
        return found if view is None else found.as_strided(*view)

    def fetch(self) -> None:
        """Begin to copy back what waits."""
        for reference in self._waiting:
            waiting = reference()
            if waiting is not None:
                waiting.fetch()


_Packed = tuple[_Pass, _OnHost | Tensor, tuple[torch.Size, tuple[int, ...]] | None]
"""A pass, what it keeps on the host or here, and how that is looked at."""

_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
