"""Offload and compress activations: keep the tensors that layers save for backward on the CPU, in 8 bits, or both.

::

    forward   layer 1 --copy--> CPU     layer 2 --copy--> CPU     ...            copies overlap with compute
    backward                            layer 2 <--copy-- CPU    layer 1 <-- fetched while layer 2 computes

Saved-tensor hooks wrap each layer, outside of recomputation, so for a recomputed layer only its input is offloaded.
Parameters and tensors below a minimum size stay on the device. Tensors that all layers receive in addition to their
input (position embeddings, masks) stay too, since each layer would store a copy. On a CPU the same copies are made
synchronously.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..._compat.torch import (
    base_of,
    own_buffers,
    own_parameters,
    storage_key,
    tree_leaves,
    version_of,
)
from ..._compat.transformers.hidden_states import hidden_states_of
from ...distributed.ops.shared_casts import is_shared_cast
from ...errors import ConfigError
from ...plan.feature_plans import FEW, compressed, offloaded
from ...train.runtime import Part, Runtime, local_tensor, memory_of
from ...train.runtime.shards import LocalWeights
from .recipes import in_memory_order
from .stored import Compressed, OnHost, Stored


class LayerPass:
    """Pack and unpack the tensors that a layer saves in one forward pass, except parameters.

    Tensors with one number per row of a previously saved tensor are kept exact, because such numbers normalize rows:
    the log-sum-exps of attention (minus infinity if a query reads no key), or the statistics of a norm. Attention and
    norms save the rows before these numbers.

    Args:
        store: function that stores a saved tensor. Called with the tensor and whether the tensor must stay exact;
            returns ``None`` to leave the tensor unchanged.
        before: the forward pass through the previous layer, for prefetching.
        beside: tensors that other layers receive too; they stay on the device. If they have four dims, they may be
            masks ``[b, heads or 1, queries, keys]``, so saved tensors of the same shape are kept exact: attention may
            save a mask in another dtype, and no common scale represents both infinities and biases.
    """

    def __init__(
        self,
        layer: nn.Module,
        store: Callable[[Tensor, bool], Stored | None],
        before: "LayerPass | None",
        beside: Collection[Tensor],
    ) -> None:
        self._store, self._before = store, None if before is None else weakref.ref(before)
        owned = [(*own_parameters(m).values(), *own_buffers(m).values()) for m in layer.modules()]
        held = [tensor for parameter in owned for tensor in parameter if tensor is not None]
        self._stays = {
            storage_key(plain)
            for tensor in (*held, *beside)
            for plain in memory_of(tensor.detach())
        }
        shapes = {tuple(local_tensor(tensor.detach()).shape) for tensor in held} | set(
            map(_shape_of, layer.modules())
        )
        self._of_weights = {shape for shape in shapes if len(shape) > 1} | {
            shape[::-1] for shape in shapes
        }
        self._of_masks = {tuple(tensor.shape) for tensor in beside if tensor.ndim == 4}
        self._rows = set[tuple[int, ...]]()
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, Stored]] = {}
        self._waiting: list[weakref.ref[Any]] = []
        self._read = False

    def over(self) -> None:
        """Free the records that only :meth:`pack` needs; called when the layer's forward pass ends."""
        self._known, self._stays, self._rows = {}, set(), set()

    def pack(self, tensor: Tensor) -> "Kept":
        """Store a saved tensor; autograd calls it for every tensor that an operation saves."""
        local = tensor.detach()
        shape = tensor.shape
        stride = tensor.stride()
        if tensor.ndim > 1 and shape[-1] > _PAIR:
            self._rows |= {
                tuple(shape[:-1]),
                (*shape[:-1], 1),
            }
        size = local.numel() * local.element_size()
        storage = local.untyped_storage()
        if storage_key(storage) in self._stays or is_shared_cast(local) or storage.nbytes() < size:
            return self, local, None
        in_order = in_memory_order(local)
        dense = in_order.is_contiguous()
        if dense:  # store all views of the same memory once
            local = in_order.view(-1)
        key = (
            storage_key(storage),
            local.data_ptr(),
            local.shape,
            local.stride(),
            local.dtype,
            version_of(tensor),
        )
        alive, stored = self._known.get(key, (None, None))
        if stored is None or alive is None or alive.expired():
            # a tensor with the shape of a weight may be a cast or dequantized weight, which stays exact; but a view
            # with other dims than its base is a view of rows that only happens to have this shape
            base = base_of(tensor)
            exact = tuple(shape) in self._of_weights and (base is None or base.ndim == tensor.ndim)
            exact = exact or tuple(shape) in self._of_masks or tuple(shape) in self._rows
            stored = self._store(local, exact)
            if stored is None:
                return self, tensor.detach(), None
            self._known[key] = StorageWeakRef(storage), stored
            self._waiting.append(weakref.ref(stored))
        stored.readers += 1
        return self, stored, (shape, stride) if dense else None

    def unpack(self, kept: "Kept") -> Tensor:
        """Return a saved tensor to the backward pass. The first call prefetches the saved tensors of the previous
        layer.
        """
        _, saved, view = kept
        if isinstance(saved, Tensor):
            return saved
        values = saved.read()
        before = None if self._before is None else self._before()
        if not self._read and before is not None:
            before.fetch()
        self._read = True
        return values if view is None else values.as_strided(*view)

    def fetch(self) -> None:
        """Begin to copy all stored tensors of this layer back to the device."""
        for reference in self._waiting:
            waiting = reference()
            if waiting is not None:
                waiting.fetch()


_PAIR = 2
"""Largest last dim with which a saved tensor is not treated as a matrix of rows, because rotary embeddings view numbers
as pairs. (A tensor with one number per row of an earlier matrix is kept exact.)
"""

Kept = tuple[LayerPass, Stored | Tensor, tuple[torch.Size, tuple[int, ...]] | None]
"""Describes what a saved-tensor hook keeps: the layer's forward pass; the stored or unchanged tensor; and the saved
tensor's size and stride if it is stored flat, otherwise ``None``.
"""


def _shape_of(module: nn.Module) -> tuple[int, ...]:
    """Return the shape ``(out, in)`` of a projection's weight, also if it is quantized; ``()`` for other modules."""
    sizes = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else ()  # type: ignore[return-value]


class KeptActivations(Part):
    """Offload or compress activations if the plan includes it; installed after recomputation.

    Attributes:
        copied: bytes copied to the CPU so far.
        stored: bytes of compressed activations (8 bits) so far.
        given: bytes of the same activations before compression.
    """

    copied = 0
    stored = 0
    given = 0
    _to_host: int | None = None
    _to_bytes: int | None = None
    _latest: weakref.ref[LayerPass] | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap the layers with saved-tensor hooks."""
        self._to_host = offloaded(runtime.plan).activations
        self._to_bytes = compressed(runtime.plan)
        rounds_routes = self._to_bytes is not None and bool(runtime.plan.mixtures)
        for name in filter(runtime.is_local, runtime.plan.layers):
            self._wrap(runtime.model.get_submodule(name), rounds_routes)

    @property
    def rounds(self) -> bool:
        """Return whether activations are compressed to 8 bits."""
        return self._to_bytes is not None

    def metrics(self, runtime: Runtime) -> Mapping[str, float]:
        """Return the bytes offloaded, and the bytes before and after compression."""
        metrics = (
            {} if self._to_host is None else {"offloaded_activation_bytes": float(self.copied)}
        )
        if self._to_bytes is not None:
            metrics |= {
                "compressed_activation_bytes": float(self.stored),
                "activation_bytes": float(self.given),
            }
        return metrics

    def _wrap(self, layer: nn.Module, rounds_routes: bool) -> None:
        """Wrap a layer's forward in saved-tensor hooks. ``rounds_routes``: the model has MoE layers whose inputs are
        compressed. If transformers would recompute a layer from this input, which may send tokens to other experts than
        the original pass, the forward raises :class:`ConfigError`.
        """
        forward = layer.forward

        def forward_keeping(*args: Any, **kwargs: Any) -> Any:
            if not (layer.training and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            if rounds_routes and getattr(layer, "gradient_checkpointing", False):
                raise ConfigError(
                    "compress_activations= with model.gradient_checkpointing_enable(): an MoE layer that is recomputed "
                    "from its compressed input may send tokens to other experts than before: call "
                    "model.gradient_checkpointing_disable(), or use offload_activations=True instead of "
                    "compress_activations"
                )
            hidden = hidden_states_of(args, kwargs)
            values = hidden.numel() if isinstance(hidden, Tensor) else 0
            before = None if self._latest is None else self._latest()
            beside = [
                leaf
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and leaf is not hidden
            ]
            current = LayerPass(layer, partial(self.store, values), before, beside)
            self._latest = weakref.ref(current)
            with torch.autograd.graph.saved_tensors_hooks(current.pack, current.unpack):
                output = forward(*args, **kwargs)
            current.over()
            return output

        forward_keeping.__wrapped__ = forward  # type: ignore[attr-defined]  # transformers inspects forward's signature
        layer.forward = forward_keeping  # type: ignore[method-assign]

    def store(self, values: int, tensor: Tensor, stays_exact: bool) -> Stored | None:
        """Offload or compress a saved tensor of a layer whose input has ``values`` entries. Return ``None`` if the
        tensor stays unchanged.
        """
        size = tensor.numel() * tensor.element_size()
        rounded = (
            self._to_bytes is not None and tensor.is_floating_point() and size >= self._to_bytes
        )
        if rounded and tensor.numel() * FEW > values and not stays_exact:
            stored = Compressed(tensor, Stored if self._to_host is None else OnHost)
            self.stored = self.stored + stored.size
            self.given = self.given + size
            self.copied += stored.size if self._to_host is not None else 0
            return stored
        if self._to_host is None or size < self._to_host:
            return None
        self.copied += size
        return OnHost(tensor)
