"""Torch's attention kernels that also return the log-sum-exp (``lse``). Read and run with torch 2.13 to 2.15.

Shapes: queries ``[b, h, rows, d]``, keys and values ``[b, h, columns, d]``; ``lse`` ``[b, h, rows]``.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_aten: Any = torch.ops.aten


def flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention output ``[b, h, rows, d]`` and the log-sum-exp of its scores ``[b, h, rows]``, from torch's
    flash kernel for the CPU. Several query heads may share a key head.

    Raises:
        ValueError: the number of query heads is no multiple of that of key heads; the kernel does not check that.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads, got {q.shape[1]} and "
            f"{k.shape[1]}: change num_attention_heads or num_key_value_heads in the config"
        )
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )


@cache
def flash_broadcasts_heads() -> bool:
    """Return whether torch's fused attention broadcasts a single key head to all query heads, as it does since torch
    2.14.

    This is tried on the CPU. Before 2.14, models with a single key head (Falcon) got the kernel that keeps all
    attention scores in memory.
    """
    query = torch.zeros(1, 2, 1, 8, requires_grad=True)
    key = torch.zeros(1, 1, 1, 8)
    made_by = scaled_dot_product_attention(query, key, key).grad_fn
    assert made_by is not None
    return made_by.name().startswith("ScaledDotProduct")


def flash_on_cpu_backward(
    *given: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. ``given`` are the gradient of the output, q, k, v, the output and lse."""
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(*given, 0.0, causal, attn_mask=bias, scale=scale)


def flash_takes(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Return whether :func:`flash_on_cuda` and its backward pass support the head width on a GPU of the given compute
    capability. The rule is torch's own for choosing a kernel (``sdp_utils.cpp``), since meta functions do not check it.
    Callers pad widths to multiples of 8.
    """
    if dtype not in (torch.float16, torch.bfloat16) or capability < (8, 0) or head_dim % 8:
        return False
    # Consumer and workstation GPUs.
    few_registers = capability in ((8, 6), (8, 9)) or capability >= (
        12,
        0,
    )
    return head_dim <= (192 if few_registers else 256)


def flash_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention output ``[b, h, rows, d]`` and the log-sum-exp of its scores ``[b, h, rows]``, from torch's
    flash kernel for CUDA, in 16 bits. Several query heads may share a key head.
    """
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def flash_on_cuda_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    off = torch.zeros((), dtype=torch.int64, device=q.device)  # RNG state of a dropout with p=0
    return _aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        off,
        off,
        scale=scale,
    )
