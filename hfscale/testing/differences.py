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
