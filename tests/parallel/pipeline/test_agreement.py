"""What stages tell each other of tied tensors."""

import pytest
import torch

from hfscale.parallel.pipeline.agreement import _sum_of_bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_copies_are_compared_exactly_whatever_order_sums_are_made_in(dtype: torch.dtype) -> None:
    """A GPU may add in another order on each stage, which changes sums of floating-point numbers."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 30, (37, 41), generator=generator)
    copy = (torch.randn(37, 41, generator=generator, dtype=torch.float64) * 2.0**exponents).to(
        dtype
    )
    assert torch.equal(_sum_of_bits(copy), _sum_of_bits(copy.flip(0, 1).T))
    other = copy.clone()
    other[3, 5] *= 1 + torch.finfo(dtype).eps
    assert not torch.equal(_sum_of_bits(copy), _sum_of_bits(other))
