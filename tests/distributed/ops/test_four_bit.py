"""4-bit weights that data ranks shard: scales of all rows at once, values where they belong, few copies."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hfscale._compat.bitsandbytes import functional
from hfscale.distributed.ops import four_bit
from hfscale.distributed.ops.four_bit import FourBitEncoding, encode, read_scales, split_row
from hfscale.plan.quantized import BLOCK

from .pieces import as_on_gpus


def quantized(
    shards: int, matrices: int, rows: int, double: bool = True, dim: int = 1, missing: int = 0
) -> tuple[Tensor, Tensor, FourBitEncoding]:
    """The gathered bytes of a weight, its values, and how to read it; the last shard has ``missing`` rows fewer."""
    sizes = [matrices, shards * rows, BLOCK * 3]
    if dim == 2:
        sizes[1:] = rows, shards * BLOCK * 3
    sizes[dim] -= missing
    encoding = FourBitEncoding(tuple(sizes), torch.float32, None, "nf4", double, shards, dim)
    weight = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    shares = weight.chunk(shards, dim=dim)
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


class Clones(TorchDispatchMode):
    """The bytes of each clone."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.clone:
            self.bytes.append(found.numel() * found.element_size())
        return found


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shards", "matrices", "rows", "dim", "missing"),
    [(2, 1, 64, 1, 0), (4, 1, 33, 1, 5), (3, 1, 2, 1, 0), (2, 3, 7, 1, 1), (2, 1, 8, 2, 0)],
)
def test_rows_are_dequantized_where_they_belong(
    double: bool, dtype: torch.dtype, shards: int, matrices: int, rows: int, dim: int, missing: int
) -> None:
    """The same bits as of all rows at once, without copies of the gathered bytes."""
    gathered, _, encoding = quantized(shards, matrices, rows, double, dim, missing)
    with Clones() as at_once:
        expected = encoding.decode(gathered, dtype)
    assert gathered.shape[0] * encoding.weight_bytes in at_once.bytes
    with patch.object(four_bit, "_LARGE", 0), as_on_gpus() as read, Clones() as apart:
        found = encoding.decode(gathered, dtype)
    assert torch.equal(found, expected)
    memory = gathered.untyped_storage().data_ptr()
    assert [each.untyped_storage().data_ptr() for each in read] == [memory] * shards
    assert shards * encoding.weight_bytes not in apart.bytes
    if encoding.is_one_stream:
        # Of scales that are quantized too, what their blocks are scaled by.
        assert len(apart.bytes) == double


@pytest.mark.parametrize(
    ("shards", "large", "apart"), [(2, 1 << 20, True), (4, 1 << 20, False), (4, 1, True), (1, 1, False)]
)  # fmt: skip
def test_small_rows_are_copied(shards: int, large: int, apart: bool) -> None:
    _, _, encoding = quantized(shards, 1, 16, double=False)
    with patch.object(four_bit, "_LARGE", large):
        assert not encoding.decodes_rows_apart(torch.device("cpu"))
        assert encoding.decodes_rows_apart(torch.device("cuda")) == apart


@pytest.mark.parametrize("double", [False, True])
def test_all_rows_at_once_are_copied_once(double: bool) -> None:
    gathered, _, encoding = quantized(2, 1, 16, double)
    with Clones() as seen:
        encoding.decode(gathered)
    assert len(seen.bytes) == 2  # the packed bytes, and scales or what their blocks are scaled by
