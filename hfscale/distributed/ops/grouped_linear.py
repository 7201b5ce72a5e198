"""Apply one linear layer per group of rows: ``out[r] = x[r] @ weight[g].T + bias[g]`` for row ``r`` of group ``g``;
biases are added by :func:`add_biases`.

The rows of a group are contiguous. torch's grouped matrix product is used if it supports the device and dtype.
Otherwise there is one matrix product per group, which supports every dtype; on a CPU, torch's own function does the
same. A group without rows still gets a gradient of zeros.

Linear layers with frozen quantized weights, grouped or not, dequantize the weights in the forward pass and again in the
backward pass. Autograd saves no weight in between, so FSDP may reshard and gather the bytes again (ZeRO stage 3).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..._compat.torch import gradients_asked, is_checkpointed
from ..._compat.torch_device import capability_of, is_accelerator
from .collectives import apply_mapping

# alignment, in bytes, that torch's grouped product requires of the rows of its operands
ALIGNED = 16
# The kernel supports Hopper and datacenter Blackwell GPUs; elsewhere torch loops over groups and waits for the device.
_KERNEL_CAPABILITIES = (9, 10)
Read = Callable[[torch.dtype], Tensor]  # returns the weight, dequantized to a dtype


class _GroupedLinear(torch.autograd.Function):
    """Multiply each group of rows with the matrix of its group, one matrix product per group: ``x [r, k]`` -> ``[r,
    n]`` for ``r`` rows of all groups.

    ``weight`` is ``[g, n, k]`` for ``g`` groups, or ``[g, k, n]`` if ``transposed``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int], transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        ctx.transposed = transposed
        out = x.new_empty((x.shape[0], weight.shape[2 if transposed else 1]))
        start = 0
        for group, count in enumerate(counts):
            if count:
                matrix = weight[group] if transposed else weight[group].t()
                torch.mm(
                    x[start : start + count],
                    matrix,
                    out=out[start : start + count],
                )
                start += count
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = (
            torch.empty_like(operand) if asked else None
            for operand, asked in zip((x, weight), gradients_asked(ctx), strict=False)
        )
        start = 0
        for group, count in enumerate(ctx.counts):
            rows = x[start : start + count]
            grad = grads[0][start : start + count]
            if of_x is not None and count:
                matrix = weight[group].t() if ctx.transposed else weight[group]
                torch.mm(grad, matrix, out=of_x[start : start + count])
            if of_weight is not None and not count:
                of_weight[group].zero_()
            elif of_weight is not None:
                torch.mm(
                    *((rows.t(), grad) if ctx.transposed else (grad.t(), rows)),
                    out=of_weight[group],
                )
            start += count
        return of_x, of_weight, None, None


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int],
    *,
    transposed: bool = False,
) -> Tensor:
    """Multiply each row of ``x [rows, k]`` with the matrix of its group; return ``[rows, n]``.

    Args:
        x: the rows, sorted by group.
        weight: ``[groups, n, k]``, or ``[groups, k, n]`` if ``transposed``.
        counts: the number of rows of each group.
        transposed: whether the weight's last two dims are swapped.
    """
    if _has_kernel(x, weight):
        return F.grouped_mm(
            x, weight if transposed else weight.transpose(1, 2), offs=_group_ends(counts, x.device)
        )
    return _GroupedLinear.apply(x, weight, counts, transposed)


def add_biases(out: Tensor, biases: Tensor, counts: Sequence[int]) -> Tensor:
    """Return ``out [rows, n]`` plus, in each row, the bias of its group in ``biases [groups, n]``."""
    rows = torch.arange(len(out), dtype=torch.int32, device=biases.device)
    groups = torch.bucketize(rows, _group_ends(counts, biases.device), right=True)
    return out + biases.index_select(0, groups)


def _group_ends(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return, for each group, the index after its last row, as a tensor ``[groups]`` on ``device``; the CPU does not
    wait for the copy.
    """
    ends = torch.tensor(
        list(accumulate(counts)), dtype=torch.int32, pin_memory=is_accelerator(device)
    )
    return ends.to(device, non_blocking=True)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cuda"
        and kernel_takes(x, weight)
        and capability_of(x.device)[0] in _KERNEL_CAPABILITIES
        and x.data_ptr() % ALIGNED == weight.data_ptr() % ALIGNED == 0
    )


def kernel_takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped matrix product supports ``x`` and ``weight``, in the forward and backward pass:
    both must be contiguous, in bfloat16, and their rows must be multiples of 16 bytes.
    """
    sizes = (x.shape[1], *weight.shape[1:])
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and x.shape[0] > 0
        and all(size > 0 and size * x.element_size() % ALIGNED == 0 for size in sizes)
        and x.is_contiguous()
        and weight.is_contiguous()
    )


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        product: Callable[[Tensor, Tensor | None], Tensor],
        read: Read,
    ) -> Tensor:
        ctx.read = read
        ctx.bias_type = None if bias is None else bias.dtype
        return product(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad = grads[0]
        of_x = torch.matmul(grad, ctx.read(grad.dtype)) if ctx.needs_input_grad[0] else None
        of_bias = (
            grad.flatten(0, -2).sum(0, dtype=ctx.bias_type) if ctx.needs_input_grad[1] else None
        )
        return of_x, of_bias, None, None


def frozen_linear(
    x: Tensor,
    bias: Tensor | None,
    product: Callable[
        [
            Tensor,
            Tensor | None,
        ],
        Tensor,
    ],
    read: Read,
    by_values: bool = False,
) -> Tensor:
    """Return ``product(x, bias)``, which multiplies ``x`` with a frozen weight ``[out, in]`` that autograd does not
    save.

    The backward pass calls ``read`` with a dtype to get the weight again. ``by_values`` says that ``product``
    multiplies with exactly the result of ``read``. In a checkpointed layer, that result is then saved after all, so
    that the repeated forward pass and the backward pass call ``read`` once.
    """
    # A bias that trains has a gradient in its own dtype.
    trains = bias is not None and bias.requires_grad
    if by_values and is_checkpointed() and not (trains or torch.compiler.is_compiling()):
        return F.linear(x, read(x.dtype), bias)
    return _FrozenLinear.apply(x, bias, product, read)


def frozen_grouped_linear(
    x: Tensor, read: Read, counts: Sequence[int], *, transposed: bool
) -> Tensor:
    """Compute :func:`grouped_linear` with a frozen weight, which autograd does not save: the forward and the backward
    pass each call ``read`` to get the weight in the dtype of the product.
    """

    def product(x: Tensor, turned: bool) -> Tensor:
        return grouped_linear(x, read(x.dtype), counts, transposed=turned)

    return apply_mapping(
        x, partial(product, turned=transposed), partial(product, turned=not transposed)
    )
