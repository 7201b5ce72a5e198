"""Mixed precision where the data axes do not do it, or not all of it: torch's autocast around the forward pass."""

from collections.abc import Callable
from typing import Any

import torch

from ..families.precision import WIDENS_INSIDE
from ..options import MIXED_PRECISIONS
from ..runtime import Part, Runtime
from ..runtime.local_weights import LocalWeights


class Autocast(Part):
    """Nothing without mixed precision; over several data ranks, whose wrapper casts what goes into a layer, only for
    families that go on in 32 bits inside.
    """

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Put autocast around ``model.forward``."""
        dtype, model = MIXED_PRECISIONS[runtime.options.mixed_precision], runtime.model
        if dtype is None or (runtime.mesh.data_world > 1 and runtime.plan.family not in WIDENS_INSIDE):
            return
        forward: Callable[..., Any] = model.forward
        device = runtime.mesh.device.type

        def autocast_forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                return forward(*args, **kwargs)

        autocast_forward.__wrapped__ = forward  # type: ignore[attr-defined]  # the host inspects forward's signature
        model.forward = autocast_forward
