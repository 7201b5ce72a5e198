"""One linear layer per group of rows: ``out[r] = x[r] @ weight[g].T + bias[g]`` for the rows ``r`` of group ``g``.

Rows of one group lie side by side. Where torch has a grouped matrix product for the device and type it is used; else
there is a matrix product per group, which on a CPU is what torch's own does, and which serves every type. A group
without rows takes part all the same: its gradient is zero, and not missing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class _GroupedLinear(torch.autograd.Function):
    """``weight [g, n, k]``, or ``[g, k, n]`` where ``transposed``; ``x [r, k]`` -> ``[r, n]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int], transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.transposed = counts, transposed
        out = x.new_empty((x.shape[0], weight.shape[2 if transposed else 1]))
        start = 0
        for group, count in enumerate(counts):
            if count:
                matrix = weight[group] if transposed else weight[group].t()
                torch.mm(x[start : start + count], matrix, out=out[start : start + count])
                start += count
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        start = 0
        for group, count in enumerate(ctx.counts):
            rows, grad = x[start : start + count], grads[0][start : start + count]
            if of_x is not None and count:
                matrix = weight[group].t() if ctx.transposed else weight[group]
                torch.mm(grad, matrix, out=of_x[start : start + count])
            if of_weight is not None and not count:
                of_weight[group].zero_()
            elif of_weight is not None:
                torch.mm(*((rows.t(), grad) if ctx.transposed else (grad.t(), rows)), out=of_weight[group])
            start += count
        return of_x, of_weight, None, None


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int], *, transposed: bool = False
) -> Tensor:
    """``x [rows, k]`` through the layer of each row's group.

    Args:
        weight: ``[groups, n, k]``, or ``[groups, k, n]`` where ``transposed``.
        bias: ``[groups, n]``.
        counts: rows in each group; they add up to the rows of ``x``.
    """
    if _has_kernel(x, weight):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        out: Tensor = F.grouped_mm(x, weight if transposed else weight.transpose(1, 2), offs=ends)
    else:
        out = _GroupedLinear.apply(x, weight, counts, transposed)
    if bias is not None:
        repeats = torch.tensor(counts, device=x.device)
        out = out + bias.repeat_interleave(repeats, dim=0, output_size=x.shape[0])
    return out


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cuda"
        and x.dtype == weight.dtype == torch.bfloat16
        and x.shape[0] > 0
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )
