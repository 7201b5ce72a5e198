"""Share one mixed-precision copy of each weight between all microbatches that compute with the weight.

Autocast makes new copies in every forward pass, and each microbatch keeps its copies until its backward pass. A
pipeline stage with eight microbatches in flight would hold eight copies of every weight. The weights are the same for
all microbatches, so one copy is enough. As without sharing, each microbatch's gradient is computed in 16 bits and added
to the weight's gradient in 32 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..._compat.torch import storage_key
from .collectives import apply_mapping

_Key = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
# Not thread-local: a backward pass, which may recompute layers, may run in another thread.
_current: "Casts | None" = None


@dataclass
class Casts:
    """Hold the low-precision copies of weights that passes share; valid while the weights do not change."""

    memory: set[int] = field(default_factory=set)  # the storages of the copies
    # copies without a graph, by the weight's storage, offset, shape and strides, and the copy's dtype
    plain: dict[_Key, Tensor] = field(default_factory=dict)
    # views of these copies with an autograd graph, for weights that train
    in_graph: dict[_Key, Tensor] = field(default_factory=dict)


@contextmanager
def sharing(casts: Casts | None) -> Iterator[None]:
    """Let all passes inside the ``with`` block share the low-precision copies of weights in ``casts``; ``None``: each
    pass makes its own. Weights must not change inside the block.
    """
    global _current
    before = _current
    _current = casts
    try:
        yield
    finally:
        _current = before


def is_sharing() -> bool:
    """Return whether passes currently share low-precision copies of weights."""
    return _current is not None


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which autocast would pass ``x`` to a matrix product; ``x.dtype`` if autocast is off."""
    kind = x.device.type
    casts = x.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else x.dtype


def autocasted(x: Tensor) -> Tensor:
    """Return ``x`` as autocast would pass it to a matrix product, if autocast is on; float64 is unchanged."""
    return x.to(autocast_dtype(x))


def autocasted_weight(weight: Tensor) -> Tensor:
    """Return a weight as autocast would pass it to a matrix product; while passes share copies of weights, a shared
    copy.
    """
    return cast_weight(weight, autocast_dtype(weight))


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight.to(dtype)``; while passes share copies of weights, a shared copy."""
    if (
        _current is None
        or weight.dtype == dtype
        or not weight.numel()
        or torch.compiler.is_compiling()
    ):
        return weight.to(dtype)
    key = storage_key(weight), int(weight.storage_offset()), weight.shape, weight.stride(), dtype
    plain = _current.plain.get(key)
    if plain is None:
        plain = _current.plain[key] = weight.detach().to(dtype)
        _current.memory.add(storage_key(plain.untyped_storage()))
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return plain
    if key not in _current.in_graph:
        # The node saves no tensor, so the backward passes of several microbatches may go through it.
        own = weight.dtype
        _current.in_graph[key] = apply_mapping(
            weight, lambda _: plain.view_as(plain), lambda grad: grad.to(own)
        )
    return _current.in_graph[key]


def is_shared_cast(tensor: Tensor) -> bool:
    """Return whether the tensor uses the memory of a low-precision copy of a weight that passes currently share."""
    return _current is not None and storage_key(tensor.untyped_storage()) in _current.memory
