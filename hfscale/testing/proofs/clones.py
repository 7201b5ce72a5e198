"""Build tiny clones with real weights, on which proofs run stock code."""

from typing import Any

import torch

from ..._compat.transformers.classes import from_config
from ...models.clone import tiny_clone

_LARGEST = 30_000_000  # parameters of a clone: a second or two of first values


def tiny_model(model: Any) -> Any | None:
    """Return a tiny clone with real weights in float32, which every kernel supports; ``None`` if none can be built."""
    return tiny_model_of(type(model), model.config, torch.float32)


def tiny_model_of(kind: Any, config: Any, dtype: torch.dtype, **changes: Any) -> Any | None:
    """Return a tiny clone of a class and a config; ``None`` if none can be built, or if it is still large.

    Args:
        changes: as for :func:`hfscale.models.clone.tiny_clone`.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = tiny_clone(config, **changes)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in from_config(kind, small, dtype=dtype).parameters())
            if size > _LARGEST:
                return None
            with torch.device("cpu"):
                return from_config(kind, small, dtype=dtype)
        except Exception:  # whatever stock code says of a clone it cannot build
            return None
