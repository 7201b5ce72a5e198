"""Activation offload and compression as a part: layers' saved tensors are kept on the CPU, in 8 bits, or both.

::

    forward   layer 1 --copy--> CPU     layer 2 --copy--> CPU     ...            copies overlap with compute
    backward                            layer 2 <--copy-- CPU    layer 1 <-- fetched while layer 2 computes

Saved-tensor hooks wrap each layer, outside of recomputation: of a recomputed layer, its input is offloaded. Parameters
and tensors below a minimum size stay, and so do tensors that all layers are given besides their input (position
embeddings, masks): each layer would store its own copy. On a CPU the same copies are made synchronously.
"""

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.torch import tree_leaves
from ..._compat.transformers.hidden_states import hidden_states_of
from ...errors import ConfigError
from ...plan.compress_plan import FEW, compressed
from ...plan.offload import offloaded
from ...train.runtime import Part, Runtime
from ...train.runtime.local_weights import LocalWeights
from .compressed import Compressed, Here, Stored
from .layer_pass import LayerPass
from .on_host import OnHost


class KeptActivations(Part):
    """A part that offloads or compresses activations if the plan asks for it. Installed after recomputation.

    Attributes:
        copied: bytes copied to the CPU so far.
        stored: bytes kept in 8 bits so far; ``given`` before compression.
    """

    def __init__(self) -> None:
        self.copied = self.stored = self.given = 0
        self._to_host: int | None = None
        self._to_bytes: int | None = None
        self._latest: weakref.ref[LayerPass] | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap the layers with saved-tensor hooks."""
        self._to_host, self._to_bytes = offloaded(runtime.plan).activations, compressed(runtime.plan)
        if self._to_host is not None or self._to_bytes is not None:
            rounds_routes = self._to_bytes is not None and bool(runtime.plan.mixtures)
            for name in filter(runtime.is_local, runtime.plan.layers):
                self._wrap(runtime.model.get_submodule(name), rounds_routes)

    @property
    def rounds(self) -> bool:
        """Whether any activation is kept in 8 bits."""
        return self._to_bytes is not None

    def metrics(self, runtime: Runtime) -> Mapping[str, float]:
        """Return the bytes offloaded, and the bytes before and after compression."""
        found = {} if self._to_host is None else {"offloaded_activation_bytes": float(self.copied)}
        if self._to_bytes is not None:
            found |= {"compressed_activation_bytes": float(self.stored), "activation_bytes": float(self.given)}
        return found

    def _wrap(self, layer: nn.Module, rounds_routes: bool) -> None:
        """Wrap one layer's forward with saved-tensor hooks.

        Args:
            rounds_routes: whether layers with experts keep 8 bits, so that none may be recomputed.
        """
        forward = layer.forward

        def forward_keeping(*args: Any, **kwargs: Any) -> Any:
            if not (layer.training and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            if rounds_routes and getattr(layer, "gradient_checkpointing", False):
                raise ConfigError(
                    "compress_activations= with model.gradient_checkpointing_enable(): a layer of a mixture that is "
                    "computed again from a rounded input may send tokens to other experts than before: call "
                    "model.gradient_checkpointing_disable(), or use offload_activations=True in place of 8 bits"
                )
            hidden = hidden_states_of(args, kwargs)
            values = hidden.numel() if isinstance(hidden, Tensor) else 0
            before = None if self._latest is None else self._latest()
            beside = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each is not hidden]
            current = LayerPass(layer, partial(self.store, values), before, beside)
            self._latest = weakref.ref(current)
            with torch.autograd.graph.saved_tensors_hooks(current.pack, current.unpack):
                output = forward(*args, **kwargs)
            current.over()
            return output

        forward_keeping.__wrapped__ = forward  # type: ignore[attr-defined]  # transformers inspects forward's signature
        layer.forward = forward_keeping  # type: ignore[method-assign]

    def store(self, values: int, tensor: Tensor, stays_exact: bool) -> Stored | None:
        """Offload or compress a saved tensor of a layer whose input has ``values`` entries; ``None`` to keep it."""
        size = tensor.numel() * tensor.element_size()
        if self._is_rounded(tensor, size, values) and not stays_exact:
            found = Compressed(tensor, Here if self._to_host is None else OnHost)
            self.stored, self.given = self.stored + found.size, self.given + size
            self.copied += found.size if self._to_host is not None else 0
            return found
        if self._to_host is None or size < self._to_host:
            return None
        self.copied += size
        return OnHost(tensor)

    def _is_rounded(self, tensor: Tensor, size: int, values: int) -> bool:
        least = self._to_bytes
        return least is not None and tensor.is_floating_point() and size >= least and tensor.numel() * FEW > values
