"""Measure differences between tensors."""

import torch
from torch import Tensor


def difference(
    found: Tensor, expected: Tensor, scale: Tensor | None = None, floor: float = 1e-30
) -> float:
    """Return the largest absolute difference between ``found`` and ``expected``, divided by the largest absolute entry
    of ``scale`` (default: ``expected``), or by ``floor`` if that is larger.
    """
    assert found.shape == expected.shape, f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
    if found.numel() == 0:
        return 0.0
    reference = expected if scale is None else scale
    largest = (found.cpu() - expected.cpu()).abs().max() / reference.abs().max().clamp(min=floor)
    return float("inf") if not torch.isfinite(largest) else float(largest)


def gradient_difference(
    found: Tensor, expected: Tensor, whole: Tensor, largest: float, loss: float
) -> float:
    """Return the largest difference between a shard of a gradient and its expected values, in float64, relative to the
    largest entry of the full gradient ``whole``.

    Some gradients are zero in exact arithmetic, but not after rounding: softmax is invariant to a bias of the keys, a
    batch norm to a preceding bias. So the result is 0 if all entries of ``whole``, and all differences, are at most 64
    roundings of ``loss`` or of ``largest``, the largest gradient entry of the model. The divisor is at least a
    millionth of ``largest``.
    """
    zero = 64 * torch.finfo(torch.float64).eps * max(largest, abs(loss))
    if (whole.abs() <= zero).all() and ((found.cpu() - expected.cpu()).abs() <= zero).all():
        return 0.0
    return difference(found, expected, whole, 1e-6 * largest)
