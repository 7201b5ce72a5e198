"""16-bit copies of weights that all microbatches of a step share, as a part.

Autocast frees a microbatch's copies before the next one begins. If several are in flight in a pipeline stage, each
would keep its own copy of every weight: the first of eight stages eight under 1F1B.

Projections, trained and frozen, use :mod:`hfscale.distributed.ops.shared_casts`, also with deferred weight gradients.
For other trained weights (convolutions, routers) autocast's own cache is kept for the whole step. transformers'
recomputation may be reentrant, with a first forward pass without a graph; autocast would cache copies without one, so
its cache is not kept there; recomputed layers keep no copies anyway.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ..._compat.torch import autocast_remembers, own_parameters
from ..._compat.transformers.computing import recomputes
from ...distributed.ops.shared_casts import Casts, autocasted_weight, is_sharing, sharing
from ...models.projections import PROJECTIONS
from ...train.runtime import Part, Runtime
from ...train.runtime.local_weights import LocalWeights
from ...train.runtime.mixed_weights import shares_casts


class SharedCasts(Part):
    """A part for mixed precision in pipeline stages without data ranks; over data ranks FSDP2 casts what it gathers."""

    def __init__(self) -> None:
        self._active = False

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap the projections' forward, inside of block edges; with deferred weight gradients those cast weights."""
        self._active = shares_casts(runtime)
        if not self._active:
            return
        for module in runtime.model.modules():
            if type(module) in PROJECTIONS:  # a subclass may check the dtype of its weight
                module.forward = partial(_with_shared_cast, module, module.forward)

    @contextmanager
    def around_interleaved(self, runtime: Runtime, backward: bool) -> Iterator[None]:
        """Share casts inside the `with` block, in which the weights do not change."""
        if not self._active:
            yield
            return
        with sharing(Casts()), nullcontext() if recomputes(runtime.model) else autocast_remembers():
            yield


def _with_shared_cast(module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a projection's own forward with the cast copy of its weight."""
    held = own_parameters(module)
    weight = held.get("weight")
    if torch.compiler.is_compiling() or weight is None or weight.dtype != torch.float32 or not is_sharing():
        return forward(*args, **kwargs)
    held["weight"] = autocasted_weight(weight)
    try:
        return forward(*args, **kwargs)
    finally:
        held["weight"] = weight
