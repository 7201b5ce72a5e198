"""How far two tensors are apart."""

import torch
from torch import Tensor


def difference(found: Tensor, expected: Tensor, scale: Tensor | None = None, floor: float = 1e-30) -> float:
    """Largest difference, relative to the largest entry of ``scale``, or to ``floor`` where that is larger."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
    if found.numel() == 0:
        return 0.0
    reference = expected if scale is None else scale
    largest = (found.cpu() - expected.cpu()).abs().max() / reference.abs().max().clamp(min=floor)
    return float("inf") if not torch.isfinite(largest) else float(largest)


def gradient_difference(found: Tensor, expected: Tensor, whole: Tensor, largest: float, loss: float) -> float:
    """The same of a share of a gradient in float64, of which some are zero in truth.

    Softmax does not see the bias of its keys, nor a loss over classes what is added to all of them; a batch norm
    removes what the bias before it adds. All that is left of such a sum is rounding, and another order of it is another
    number. A tensor that is within 64 roundings of the largest gradient, or of the loss, is taken for zero, and what is
    within as much of it is equal. Others are measured by themselves, or a millionth of the largest gradient.

    Args:
        found: of a layout.
        expected: the same share of one process's.
        whole: of which it is a share.
        largest: entry of any gradient of the model.
        loss: of the step.
    """
    zero = 64 * torch.finfo(torch.float64).eps * max(largest, abs(loss))
    if (whole.abs() <= zero).all() and ((found.cpu() - expected.cpu()).abs() <= zero).all():
        return 0.0
    return difference(found, expected, whole, 1e-6 * largest)
