"""Mixed precision by torch's autocast around the forward pass, where FSDP2 does not cast, or not everything."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ..._compat.torch import autocast_remembers, own_parameters
from ..._compat.transformers.computing import recomputes
from ...config.options import MIXED_PRECISIONS
from ...distributed.ops.shared_casts import Casts, autocasted_weight, is_sharing, sharing
from ...models.module_kinds import PROJECTIONS
from ...models.precision import WIDENS_INSIDE
from ...train.runtime import Part, Runtime
from ...train.runtime.shards import LocalWeights


class Autocast(Part):
    """Autocast the forward pass under mixed precision. Over several data ranks FSDP2 casts a layer's weights and
    inputs, so this is used only for families that compute in 32 bits inside their layers.
    """

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap ``model.forward`` in autocast."""
        dtype, model = MIXED_PRECISIONS[runtime.options.mixed_precision], runtime.model
        if dtype is None or (runtime.mesh.data_world > 1 and runtime.plan.family not in WIDENS_INSIDE):
            return
        forward: Callable[..., Any] = model.forward
        device = runtime.mesh.device.type

        def autocast_forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                return forward(*args, **kwargs)

        autocast_forward.__wrapped__ = forward  # type: ignore[attr-defined]  # transformers inspects its signature
        model.forward = autocast_forward


class SharedCasts(Part):
    """A part for mixed precision in pipeline stages without data ranks; over data ranks FSDP2 casts what it gathers."""

    def is_needed(self, runtime: Runtime) -> bool:
        """Return whether microbatches in flight share casts."""
        return runtime.shares_casts

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap the projections' forward, inside of block edges; with deferred weight gradients those cast weights."""
        for module in runtime.model.modules():
            if type(module) in PROJECTIONS:  # a subclass may check the dtype of its weight
                module.forward = partial(_with_shared_cast, module, module.forward)

    @contextmanager
    def around_interleaved(self, runtime: Runtime, backward: bool) -> Iterator[None]:
        """Share casts inside the `with` block, in which the weights do not change."""
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
