"""The same random tensors on every rank, and how a dim is cut over two; ranks import this, so it names no fixtures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hfscale._compat.bitsandbytes import functional
from hfscale.distributed.ops import four_bit

CUTS: list[tuple[tuple[int, ...], int, tuple[int, int]]] = [
    ((2, 7, 3), 1, (4, 3)),
    ((2, 7, 3), -2, (6, 1)),
    ((5, 3), 0, (5, 0)),
    ((2, 3, 8), -1, (4, 4)),
]
"""Shape of the whole, dim, entries of each rank: even, uneven, none."""


class Products(TorchDispatchMode):
    """The shapes of the matrix products that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            self.shapes.append(tuple(found.shape))
        return found


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def piece(whole: Tensor, lengths: Sequence[int], dim: int, rank: int) -> Tensor:
    return whole.narrow(dim, sum(lengths[:rank]), lengths[rank])


def loss(x: Tensor, weights: Tensor) -> Tensor:
    """Not linear, so that what comes back depends on what went in."""
    return (x.sin() * weights).sum()


@contextmanager
def as_on_gpus() -> Iterator[list[Tensor]]:
    """Yield the bytes that are dequantized in the with block; values are written to where they belong, as on GPUs."""
    plain = functional().dequantize_4bit
    read: list[Tensor] = []

    def written(quantized: Tensor, state: Any, out: Tensor) -> None:
        assert quantized.is_contiguous()
        assert state.absmax.is_contiguous()
        assert out.is_contiguous()
        assert out.shape == state.shape
        read.append(quantized)
        out.copy_(plain(quantized, state).view(out.shape))

    with (
        patch.object(four_bit, "writes_into", lambda _: True),
        patch.object(functional(), "dequantize_4bit", written),
    ):
        yield read
