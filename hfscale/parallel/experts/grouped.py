"""Run the experts of one rank on rows grouped by expert.

Packed experts (QLoRA, Dettmers et al. 2023) are dequantized for one projection at a time, in the forward pass and
again in the backward pass.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._compat.peft import terms_of_experts
from ..._compat.transformers.experts import apply_gate
from ...distributed.ops.grouped_linear import frozen_grouped_linear, grouped_linear
from ...distributed.ops.packed_weights import packings_of, read_packed
from ...distributed.ops.shared_casts import cast_weight
from ...train.runtime import local_tensor
from ...train.runtime.parameter_names import unwrapped


def compute_type(experts: Any, x: Tensor) -> torch.dtype:
    """Return the dtype that the transformers module ``experts`` computes in now, given input ``x``."""
    experts = unwrapped(experts)
    weight: Tensor = experts.down_proj
    if torch.is_autocast_enabled(weight.device.type) and weight.dtype != torch.float64:  # which it leaves alone
        return torch.get_autocast_dtype(weight.device.type)
    packing = packings_of(experts).get("down_proj")
    return weight.dtype if packing is None else packing.compute_dtype or x.dtype


def run_experts(experts: Any, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute what a transformers module of experts does on rows ``x [rows, h]``, ``counts`` of them per expert,
    without routes' weights. Its parameters and functions are looked up at each call, so that replaced ones are used.
    """
    dtype = compute_type(experts, x)
    added, experts = low_rank_terms(experts), unwrapped(experts)
    biased, transposed = experts.has_bias, experts.is_transposed

    def linear(x: Tensor, name: str) -> Tensor:
        out = whole_rank(x, name)
        for a, b, scaling in added.get(name, ()):
            inner = grouped_linear(x, a.to(dtype), None, counts)
            out = out + scaling * grouped_linear(inner, b.to(dtype), None, counts)
        return out

    def whole_rank(x: Tensor, name: str) -> Tensor:
        bias = local_tensor(getattr(experts, f"{name}_bias")).to(dtype) if biased else None
        if name in packings_of(experts):
            return frozen_grouped_linear(x, partial(_dequantized, experts, name), bias, counts, transposed=transposed)
        weight = cast_weight(local_tensor(getattr(experts, name)), dtype)
        return grouped_linear(x, weight, bias, counts, transposed=transposed)

    if experts.has_gate:
        inner = apply_gate(experts, linear(x.to(dtype), "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(x.to(dtype), "up_proj"))
    out = linear(inner, "down_proj")
    return experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out


def low_rank_terms(experts: Any) -> dict[str, list[tuple[Tensor, Tensor, float]]]:
    """Return the LoRA factors of each expert parameter, ``A [e, r, in]``, ``B [e, out, r]`` and their scale. PEFT adds
    ``B A`` to the weights of all experts before it computes; here rows go through the factors instead.
    """
    found: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
    for name, *both, count, scaling in terms_of_experts(experts):
        a, b = (local_tensor(factor) for factor in both)
        factors = a.reshape(count, -1, a.shape[1]), b.reshape(b.shape[0], -1, count).permute(2, 0, 1).contiguous()
        found.setdefault(name, []).append((*factors, scaling))
    return found


def _dequantized(experts: Any, name: str, dtype: torch.dtype) -> Tensor:
    """Return a packed parameter of ``experts`` in ``dtype``; called in forward and again in backward."""
    return read_packed(experts, name).to(dtype)
