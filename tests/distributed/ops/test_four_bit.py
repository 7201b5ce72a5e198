"""Scales of 4-bit weights that data ranks shard: all rows at once, whatever the number of ranks."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hfscale._compat.bitsandbytes import functional
from hfscale.distributed.ops.four_bit import FourBitEncoding, encode, read_scales, split_row
from hfscale.plan.quantized import BLOCK


def quantized(shards: int, matrices: int, rows: int) -> tuple[Tensor, Tensor, FourBitEncoding]:
    """The gathered bytes of a weight, its values, and how to read it."""
    shape = matrices, shards * rows, BLOCK * 3
    encoding = FourBitEncoding(shape, torch.float32, None, "nf4", True, shards, dim=1)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    shares = weight.chunk(shards, dim=1)
    return torch.cat([encode(share, encoding) for share in shares]), weight, encoding


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize(("matrices", "rows"), [(1, 64), (1, 100), (3, 7)])
def test_quantized_scales_are_read_by_one_call(shards: int, matrices: int, rows: int) -> None:
    gathered, weight, encoding = quantized(shards, matrices, rows)
    scales = split_row(gathered, encoding)[1]
    read = functional().dequantize_blockwise
    with patch.object(functional(), "dequantize_blockwise", wraps=read) as seen:
        found = read_scales(scales, encoding)
    assert seen.call_count == 1
    assert found.shape == (shards * matrices, encoding.blocks)
    each = [read_scales(row.unsqueeze(0), encoding) for row in scales]
    torch.testing.assert_close(found, torch.cat(each), rtol=0, atol=0)
    exact = weight.unflatten(1, (shards, rows)).transpose(0, 1).reshape(-1, encoding.blocks, BLOCK)
    torch.testing.assert_close(found, exact.abs().amax(-1), rtol=0.05, atol=0.05)
    error = (encoding.decode(gathered) - weight).abs().max()
    assert float(error) < 0.6
