"""What one pass through one layer keeps for its backward pass, each tensor once, and put elsewhere."""

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .._host.torch import base_of, own_buffers, own_parameters, storage_key, version_of
from ..ops.shared_casts import is_shared_cast
from ..runtime import local_tensor, memory_of
from .compressed import Stored


class LayerPass:
    """Saved-tensor hooks for one pass through one layer. Parameters stay, and so does what ``store`` leaves.

    A number for each row of a tensor that was saved before it is what the row is normalized by: the logarithm of a sum
    of exponentials (minus infinity, where attention reads nothing), or the statistics of a norm. Attention and norms
    save their rows first.

    Args:
        store: what becomes of a tensor that is saved: given it, and whether it stays exact, as what may be a weight, in
            a copy, does, or a mask, or a number for each row.
        before: the pass through a layer that came before this one, while its graph is alive.
        beside: what the layer is given beside its input, and others are given, too. Of four dims it may be a mask,
            ``[b, heads or 1, queries, keys]``: attention may keep it in another type, and it has infinities, or the
            largest number there is, beside small biases, which no common scale can tell apart.
    """

    def __init__(
        self,
        layer: nn.Module,
        store: Callable[[Tensor, bool], Stored | None],
        before: "LayerPass | None",
        beside: Collection[Tensor] = (),
    ) -> None:
        self._store, self._before = store, None if before is None else weakref.ref(before)
        held = [
            tensor
            for module in layer.modules()
            for tensor in (*own_parameters(module).values(), *own_buffers(module).values())
            if tensor is not None
        ]
        self._stays = {storage_key(plain) for tensor in (*held, *beside) for plain in memory_of(tensor.detach())}
        shapes = {tuple(local_tensor(tensor.detach()).shape) for tensor in held} | set(map(_shape_of, layer.modules()))
        self._of_weights = {shape for shape in shapes if len(shape) > 1} | {shape[::-1] for shape in shapes}
        self._of_masks = {tuple(tensor.shape) for tensor in beside if tensor.ndim == 4}
        self._rows = set[tuple[int, ...]]()
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, Stored]] = {}
        self._waiting: list[weakref.ref[Any]] = []
        self._read = False

    def over(self) -> None:
        """The layer has kept what it keeps."""
        self._known, self._stays, self._rows = {}, set(), set()

    def pack(self, tensor: Tensor) -> "Packed":
        """Called for every tensor that an operation keeps."""
        local, shape, stride = tensor.detach(), tensor.shape, tensor.stride()
        if tensor.ndim > 1 and shape[-1] > _PAIR:
            self._rows.add(tuple(shape[:-1]))
        size = local.numel() * local.element_size()
        storage = local.untyped_storage()
        if storage_key(storage) in self._stays or is_shared_cast(local) or storage.nbytes() < size:
            return self, local, None
        in_order = local.permute(sorted(range(local.ndim), key=lambda dim: stride[dim], reverse=True))
        dense = in_order.is_contiguous()
        if dense:  # all views of the same memory are one
            local = in_order.view(-1)
        key = storage_key(storage), local.data_ptr(), local.shape, local.stride(), local.dtype, version_of(tensor)
        alive, found = self._known.get(key, (None, None))
        if found is None or alive is None or alive.expired():
            exact = self._may_be_weight(tensor) or tuple(shape) in self._of_masks or self._is_of_rows(shape)
            found = self._store(local, exact)
            if found is None:
                return self, tensor.detach(), None
            self._known[key] = StorageWeakRef(storage), found
            self._waiting.append(weakref.ref(found))
        found.readers += 1
        return self, found, (shape, stride) if dense else None

    def unpack(self, kept: "Packed") -> Tensor:
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

    def _may_be_weight(self, tensor: Tensor) -> bool:
        """A copy in another type, or one that was unpacked: of a weight's shape, and no rows of something larger."""
        base = base_of(tensor)
        return tuple(tensor.shape) in self._of_weights and (base is None or base.ndim == tensor.ndim)

    def _is_of_rows(self, shape: torch.Size) -> bool:
        """Whether there is a number for each row of something: ``[...]`` or ``[..., 1]`` beside ``[..., d]``."""
        return tuple(shape) in self._rows or (shape[-1:] == (1,) and tuple(shape[:-1]) in self._rows)


_PAIR = 2
"""Entries of a row that is none: rotated numbers are looked at in pairs."""

Packed = tuple[LayerPass, Stored | Tensor, tuple[torch.Size, tuple[int, ...]] | None]
"""A pass, what it keeps elsewhere or here, and how that is looked at."""


def _shape_of(module: nn.Module) -> tuple[int, ...]:
    """Of the matrix that a projection multiplies by, which may be packed."""
    sizes = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else ()  # type: ignore[return-value]
