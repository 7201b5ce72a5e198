"""Build tiny clones with real weights, on which proofs run stock code, and compare what they compute."""

from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.classes import from_config, takes_argument
from ...models.clone import tiny_clone
from ..differences import difference

_LARGEST = 30_000_000  # parameters of a clone: a second or two of first values


def tiny_model(model: Any) -> Any | None:
    """Return a tiny clone with real weights in float32, which every kernel supports; ``None`` if none can be built."""
    return tiny_model_of(type(model), model.config, torch.float32)


def tiny_model_of(kind: Any, config: Any, dtype: torch.dtype, **changes: Any) -> Any | None:
    """Return a tiny clone of a class and a config, with ``changes`` as for :func:`hfscale.models.clone.tiny_clone`;
    ``None`` if none can be built, or if it is still large.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = tiny_clone(config, **changes)
            return None if size_of(kind, small) > _LARGEST else on_cpu(kind, small, dtype)
        except Exception:  # whatever stock code says of a clone it cannot build
            return None


def size_of(kind: Any, config: Any) -> int:
    """Return the number of parameters of a class's model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in from_config(kind, config, dtype=torch.float32).parameters())


def on_cpu(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build a class's model on the CPU, whatever the default device."""
    with torch.device("cpu"):
        return from_config(kind, config, dtype=dtype)


@torch.no_grad()
def perturb(model: nn.Module, scale: float) -> None:
    """Change all weights: norms start as ones and biases as zeros, small first values hardly change anything."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * scale)


def without_cache(model: Any) -> dict[str, bool]:
    """Return the arguments that make the model keep no key/value cache."""
    return {"use_cache": False} if takes_argument(model, "use_cache") else {}


def apart(found: Tensor, wanted: Tensor, floor: float = 1e-30) -> float:
    """Return the largest difference relative to the largest entry, or to ``floor``; infinite for other shapes."""
    return difference(found, wanted, floor=floor) if found.shape == wanted.shape else float("inf")
