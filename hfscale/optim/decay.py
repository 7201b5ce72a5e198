"""Choose the parameters with weight decay by HF Trainer's rule, on the stock model's names and module types."""

import re
from typing import Any

from torch import nn

from ..train.runtime import Runtime

_NEVER = tuple(map(re.compile, (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")))
"""Patterns of lower-case parameter names that ``transformers.Trainer`` excludes from decay."""


def owners_of(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Map the ``id`` of every parameter to the modules that hold it: several if it is tied."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(module)
    return found


def decays(name: str, owners: list[nn.Module]) -> bool:
    """Return whether weight decay applies to a parameter: not to biases and norms.

    Args:
        name: in the stock model, whatever wraps its module now.
        owners: the modules that hold it; FSDP2's classes are subclasses of the stock ones.
    """
    if any(isinstance(owner, nn.LayerNorm) for owner in owners):
        return False
    return not any(pattern.search(name.lower()) for pattern in _NEVER)


def weight_decay_groups(runtime: Runtime, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of trainable parameters: with ``weight_decay``, and without. Either may be empty on a rank.

    A parameter is in the same group in every layout: the plan's name decides, not the one it has on this rank.
    """
    owners = owners_of(runtime.model)
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for planned, parameter in runtime.parameters():
        if parameter.requires_grad:
            groups[0 if decays(planned.name, owners.get(id(parameter), [])) else 1]["params"].append(parameter)
    return groups
