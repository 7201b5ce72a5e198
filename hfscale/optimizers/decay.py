"""Which parameters decay: HF Trainer's rule, on the names and module types of the stock model."""

import re
from typing import Any

from torch import nn

from ..runtime import Runtime

_NEVER = tuple(map(re.compile, (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")))
"""Parts of a parameter's name, in lower case, by which ``transformers.Trainer`` excludes it."""


def owners_of(model: nn.Module) -> dict[int, list[nn.Module]]:
    """``id`` of every parameter -> the modules that hold it: several, where it is tied."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(module)
    return found


def decays(name: str, owners: list[nn.Module]) -> bool:
    """Whether weight decay acts on a parameter: not on biases, nor on what normalizes.

    Args:
        name: in the stock model, whatever wraps its module now.
        owners: the modules that hold it; what FSDP2 makes of a class is a subclass of it.
    """
    if any(isinstance(owner, nn.LayerNorm) for owner in owners):
        return False
    return not any(pattern.search(name.lower()) for pattern in _NEVER)


def weight_decay_groups(runtime: Runtime, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups of what trains: with ``weight_decay``, and without. Either may be empty on a rank.

    A parameter is in the same group in every layout: the plan's name decides, and not the one it has on this rank.
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
