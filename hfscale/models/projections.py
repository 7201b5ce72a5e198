"""List the kinds of projections, and whether each keeps its weight transposed."""

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

PROJECTIONS = (nn.Linear, Conv1D)

# How a projection's size attributes follow its local weight: attribute -> dim of the weight. nn.Linear keeps its weight
# as [out, in], Conv1D as [in, out] = [nx, nf].
_SIZE_ATTRIBUTES = {"out_features": 0, "in_features": 1, "nx": 0, "nf": 1}


def is_transposed(module: Any) -> bool:
    """Return whether a module keeps its weight as ``[in, out]``."""
    return isinstance(module, Conv1D)


def weight_dims(module: Any) -> tuple[int, int]:
    """Return the dims of a projection's weight that run along its outputs and along its inputs."""
    return (1, 0) if is_transposed(module) else (0, 1)


def follow_weight(module: Any) -> None:
    """Set the size attributes of a projection to the sizes of its local weight."""
    for attribute, dim in _SIZE_ATTRIBUTES.items():
        if attribute in module.__dict__ and module.weight.ndim == 2:
            setattr(module, attribute, module.weight.shape[dim])


_TOKENWISE = (*PROJECTIONS, nn.Dropout, nn.Identity, nn.Embedding)


def is_tokenwise(module: nn.Module) -> bool:
    """Return whether a module is known to process each token separately."""
    return isinstance(module, _TOKENWISE) or "Norm" in type(module).__name__
