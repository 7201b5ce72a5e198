"""Mixed precision where no data axes do it: torch's autocast around the forward pass."""

from collections.abc import Callable
from typing import Any

import torch

from ..options import MIXED_PRECISIONS
from ..runtime import Part, Runtime
from ..runtime.local_weights import LocalWeights


class Autocast(Part):
    """Nothing over several data ranks, whose wrapper casts, and nothing without mixed precision."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Put autocast around ``model.forward``."""
        dtype, model = MIXED_PRECISIONS[runtime.options.mixed_precision], runtime.model
        if dtype is None or runtime.mesh.data_world > 1:
            return
        forward: Callable[..., Any] = model.forward
        device = runtime.mesh.device.type

        def autocast_forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                return forward(*args, **kwargs)

        autocast_forward.__wrapped__ = forward  # type: ignore[attr-defined]  # the host inspects forward's signature
        model.forward = autocast_forward
