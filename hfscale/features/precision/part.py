"""Mixed precision by torch's autocast around the forward pass, where FSDP2 does not cast, or not everything."""

from collections.abc import Callable
from typing import Any

import torch

from ...config.options import MIXED_PRECISIONS
from ...models.precision import WIDENS_INSIDE
from ...train.runtime import Part, Runtime
from ...train.runtime.local_weights import LocalWeights


class Autocast(Part):
    """A part that autocasts the forward pass under mixed precision.

    Over several data ranks FSDP2 casts a layer's weights and inputs, so it is used only for families that compute in 32
    bits inside their layers.
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
