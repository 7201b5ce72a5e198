"""The experts of one rank on rows that are grouped by expert."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import grouped_linear
from ..runtime import local_tensor


def compute_type(experts: Any) -> torch.dtype:
    """The type in which ``experts``, a host's module, computes now."""
    weight: Tensor = experts.down_proj
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def run_experts(experts: Any, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows ``x [rows, h]``, ``counts`` of them for each expert in ``experts``, a host's module -> ``[rows, h]``.

    What the host's own forward computes for each row, without weights of routes. The module's parameters and functions
    are looked up now, so that whatever was put in their place is used.
    """
    dtype = compute_type(experts)
    biased, transposed = experts.has_bias, experts.is_transposed

    def linear(x: Tensor, name: str) -> Tensor:
        bias = local_tensor(getattr(experts, f"{name}_bias")).to(dtype) if biased else None
        weight = local_tensor(getattr(experts, name)).to(dtype)
        return grouped_linear(x, weight, bias, counts, transposed=transposed)

    if experts.has_gate:
        inner = experts._apply_gate(linear(x.to(dtype), "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(x.to(dtype), "up_proj"))
    out = linear(inner, "down_proj")
    return experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out
