"""Tiny clones with real weights, on which proofs run stock code."""

from typing import Any

import torch

from ..._host.transformers.classes import from_config
from ...families.clone import tiny_clone

_LARGEST = 30_000_000  # parameters of a clone: a second or two of first values


def tiny_model(model: Any) -> Any | None:
    """A tiny clone with real weights, where one can be built; in 32 bits, which every kernel of the host has."""
    return tiny_model_of(type(model), model.config, torch.float32)


def tiny_model_of(kind: Any, config: Any, dtype: torch.dtype, **changes: Any) -> Any | None:
    """The same of a class and a config; ``None`` also where sizes have names that made nothing small of them.

    Args:
        changes: as for :func:`hfscale.families.clone.tiny_clone`.
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
