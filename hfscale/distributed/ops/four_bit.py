"""Hold 4-bit weights as plain bytes, which data ranks can shard and all-gather like any other tensor.

bitsandbytes keeps a 4-bit weight (QLoRA, Dettmers et al. 2023) as bytes with a state object for the scales, and FSDP2
loses this object when it shards parameters. Here each data rank keeps its shard of the weight as one row of bytes,
values and scales together (:mod:`.quantized_weights`)::

    [matrices * blocks * 32 bytes | matrices * scale_bytes]     32 bytes = one block of 64 values

There is one float32 scale per block. With double quantization the scales are stored as ``[float32 per 256 blocks |
float32 mean | byte per block]``. Row ``s`` holds the rows, columns or full matrices of the weight that data rank ``s``
read and quantized.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._compat.bitsandbytes import functional, writes_into
from ...plan.quantized import BLOCK, OUTER_BLOCK, bytes_of_scales
from .quantized_weights import Encoding, as_bytes

# Least bytes of a row's 4-bit values at which a GPU takes longer to copy them (2.8 TB/s) than to start a kernel more.
_LARGE = 2 << 20


@dataclass(frozen=True)
class FourBitEncoding(Encoding):
    """Describe how a 4-bit weight is stored as bytes: quantization type, scales, and the dim that data ranks shard."""

    quant_type: str  # ``nf4`` or ``fp4``
    double: bool  # whether the scales are quantized too
    shards: int = 1  # number of data ranks over which the weight is sharded
    dim: int = 1  # the sharded dim of ``shape``

    @property
    def chunk(self) -> tuple[int, int, int]:
        """The shape of the weight's shard on a data rank; other ranks may have smaller ones."""
        sizes = list(self.shape)
        sizes[self.dim] = ceil(sizes[self.dim] / self.shards)
        return sizes[0], sizes[1], sizes[2]

    @property
    def blocks(self) -> int:
        """The number of quantization blocks in each matrix of a data rank's shard."""
        return ceil(self.chunk[1] * self.chunk[2] / BLOCK)

    @property
    def scale_bytes(self) -> int:
        """The number of bytes of the scales of each matrix in a data rank's shard, a multiple of 4."""
        return bytes_of_scales(self.blocks, self.double)

    @property
    def weight_bytes(self) -> int:
        """The number of bytes of a data rank's 4-bit values, which are stored before its scales."""
        return self.chunk[0] * self.blocks * BLOCK // 2

    @property
    def row_shape(self) -> tuple[int, int]:
        """The shape of the weight's bytes after an all-gather: one row per data rank."""
        return self.shards, self.weight_bytes + self.chunk[0] * self.scale_bytes

    @property
    def is_one_stream(self) -> bool:
        """Return whether the gathered bytes of all data ranks are one matrix that was quantized as a single sequence of
        blocks, so that bitsandbytes can decode it as such.
        """
        if self.shape[0] != 1:
            return False
        return self.shards == 1 or (self.dim == 1 and self.chunk[1] * self.chunk[2] % BLOCK == 0)

    def decodes_rows_apart(self, device: torch.device) -> bool:
        """Return whether :meth:`decode` dequantizes each row into its place in the values, without a copy of the bytes.

        Otherwise it copies the rows' bytes, because bitsandbytes dequantizes contiguous bytes. For small rows that
        takes less time than a kernel a row.
        """
        few = self.shards == 2 or self.weight_bytes >= _LARGE
        return self.shards > 1 and few and writes_into(device)

    def decode(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values ``[matrices, rows, columns]`` of the full weight, given the bytes of all data ranks (one
        row per rank).
        """
        values = self._values(rows, dtype or self.dtype)
        if self.is_one_stream:
            return values.view(-1)[: prod(self.shape)].view(self.shape)
        matrices, height, width = self.chunk
        parts = values.view(self.shards, matrices, -1)[..., : height * width].reshape(
            -1, *self.chunk
        )
        if self.shards == 1:
            return parts[0]
        joined = parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        return joined.narrow(self.dim, 0, self.shape[self.dim])

    def _values(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of all rows, each padded to whole blocks; if they are one stream, of any shape."""
        weight, scales = split_row(rows, self)
        dequantize = functional().dequantize_4bit
        if self.decodes_rows_apart(rows.device):
            values = weight.new_empty((self.shards, 2 * self.weight_bytes), dtype=dtype)
            each = read_scales(scales, self).unflatten(0, (self.shards, -1))
            for quantized, scale, into in zip(weight, each, values, strict=True):
                state = _state(scale.reshape(-1), self, into.shape)
                state.dtype = dtype
                dequantize(quantized.unsqueeze(1), state, out=into)
            return values
        if self.is_one_stream:
            quantized, state = quantization_state(weight, scales, self)
        else:
            quantized = weight.reshape(-1, 1)
            shape = self.shards * self.chunk[0], self.blocks * BLOCK
            state = _state(read_scales(scales, self).contiguous().view(-1), self, shape)
        state.dtype = dtype
        found: Tensor = dequantize(quantized, state)
        return found

    def marks(self) -> Mapping[str, Any]:
        """Return the attributes that a 4-bit parameter of bitsandbytes has and PEFT reads, for a parameter of plain
        bytes.
        """
        return {"quant_type": self.quant_type, "compress_statistics": self.double}


def encode(share: Tensor, encoding: FourBitEncoding) -> Tensor:
    """Quantize a data rank's shard to 4 bits; return its values and scales as one row of bytes, ``uint8 [1, ...]``.

    ``share`` is ``[matrices, rows, columns]`` in 16 or 32 bits, and no larger than ``encoding.chunk``.
    """
    missing = encoding.chunk[2] - share.shape[2]
    share = F.pad(share, (0, missing)) if missing else share
    row = torch.zeros(
        (1, encoding.row_shape[1]),
        dtype=torch.uint8,
        device=share.device,
    )
    weight, scales = (
        part.view(
            encoding.chunk[0],
            part.shape[1] // max(1, encoding.chunk[0]),
        )
        for part in split_row(row, encoding)
    )
    for number, matrix in enumerate(share):
        if not matrix.numel():
            continue
        quantized, state = functional().quantize_4bit(
            matrix.contiguous(),
            blocksize=BLOCK,
            compress_statistics=encoding.double,
            quant_type=encoding.quant_type,
            quant_storage=torch.uint8,
        )
        weight[number, : quantized.numel()] = quantized.view(-1)
        if not encoding.double:
            _write(scales[number], 0, state.absmax)
            continue
        mean = 4 * ceil(encoding.blocks / OUTER_BLOCK)
        _write(scales[number], 0, state.state2.absmax)
        _write(scales[number], mean, state.offset.float().view(1))
        _write(scales[number], mean + 4, state.absmax)
    return row


def _write(row: Tensor, start: int, values: Tensor) -> None:
    stored = values.reshape(-1).contiguous().view(torch.uint8)
    row[start : start + stored.numel()] = stored


def split_row(rows: Tensor, encoding: FourBitEncoding) -> tuple[Tensor, Tensor]:
    """Divide gathered bytes (one row per data rank) into those of the 4-bit values and those of the scales, ``[shards,
    ...]`` each.
    """
    plain = as_bytes(rows)
    return plain[:, : encoding.weight_bytes], plain[:, encoding.weight_bytes :]


def quantization_state(
    weight: Tensor, scales: Tensor, encoding: FourBitEncoding
) -> tuple[Tensor, Any]:
    """Return a weight as bitsandbytes has it: its 4-bit values as bytes ``[n, 1]``, and a ``QuantState`` with its
    scales. The weight must be one matrix that was quantized as a single sequence of blocks.
    """
    _, rows, columns = encoding.shape
    size = rows * columns
    absmax = read_scales(scales, encoding).contiguous().view(-1)
    state = _state(absmax[: ceil(size / BLOCK)], encoding, (rows, columns))
    return weight.reshape(-1, 1)[: ceil(size / 2)], state


def read_scales(scales: Tensor, encoding: FourBitEncoding) -> Tensor:
    """Return one float32 scale per block, ``[shards * matrices, blocks]``; a view if the scales are not quantized."""
    rows = scales.reshape(-1, encoding.scale_bytes)
    if not encoding.double:
        return rows.view(torch.float32)
    outers = ceil(encoding.blocks / OUTER_BLOCK)
    floats = rows[:, : 4 * outers + 4].view(torch.float32)
    of_blocks = rows[:, 4 * outers + 4 :][:, : encoding.blocks]
    # Rows are padded to whole outer blocks, so that one call dequantizes all rows.
    whole = F.pad(of_blocks, (0, outers * OUTER_BLOCK - encoding.blocks)).contiguous()
    widened: Tensor = functional().dequantize_blockwise(
        whole.view(-1),
        absmax=floats[:, :outers].contiguous().view(-1),
        code=_code(rows.device),
        blocksize=OUTER_BLOCK,
    )
    return widened.view(len(rows), -1)[:, : encoding.blocks] + floats[:, outers:]


def _state(absmax: Tensor, encoding: FourBitEncoding, shape: tuple[int, ...]) -> Any:
    return functional().QuantState(
        absmax=absmax,
        shape=torch.Size(shape),
        code=_code_of_4_bits(encoding.quant_type, absmax.device),
        blocksize=BLOCK,
        quant_type=encoding.quant_type,
        dtype=encoding.dtype,
    )


@cache  # copying the values from a list synchronizes with the device, and every product needs them
def _code_of_4_bits(quant_type: str, device: torch.device) -> Tensor:
    """Return the values that bitsandbytes assigns to the 16 codes of the 4-bit type ``quant_type``."""
    return functional().get_4bit_type(quant_type, device=device)


@cache
def _code(device: torch.device) -> Tensor:
    """Return the values that bitsandbytes assigns to the 256 codes of quantized scales (double quantization)."""
    return functional().create_dynamic_map().to(device)
