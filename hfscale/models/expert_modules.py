"""Recognize how stock classes hold experts, which differs between versions and families."""

from inspect import signature
from typing import Any

from torch import nn

from .fields import first_count, text_config

EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Config fields that say how many experts there are."""

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
# What modules under the host's use_experts_implementation say of how their parameters are used.
_MARKS = ("has_gate", "has_bias", "is_transposed", "num_experts")


def experts_per_token(config: Any) -> int | None:
    """Return the number of experts per token in the config; ``None`` if it has no such field."""
    return first_count(text_config(config), _EXPERTS_PER_TOKEN)


def holds_experts(module: Any) -> bool:
    """Return whether a module holds stacked experts as transformers does, so that ranks can split them."""
    return isinstance(module, nn.Module) and all(hasattr(module, mark) for mark in _MARKS)


def takes_routes(module: nn.Module) -> bool:
    """Return whether a module is called like transformers' experts: with tokens, chosen experts and weights."""
    names = list(signature(module.forward).parameters)
    return type(module).__name__.endswith("Experts") and names[1:2] in (["top_k_index"], ["router_indices"])


def has_one_per_expert(module: nn.Module, experts: int) -> bool:
    """Return whether a module has one matrix, or one child, for each of ``experts``."""
    if isinstance(module, nn.ModuleList):
        return len(module) == experts
    own = list(module.parameters(recurse=False))
    stacked = any(parameter.ndim == 3 and parameter.shape[0] == experts for parameter in own)
    return stacked or ("Expert" in type(module).__name__ and any(parameter.ndim > 1 for parameter in own))
