"""4-bit weights as plain bytes, which data ranks can shard and gather like any other tensor.

bitsandbytes keeps a 4-bit weight (QLoRA, Dettmers et al. 2023) as packed bytes with a state object, which FSDP2 loses
when it shards parameters. Here packed bytes and scales are two ``uint8`` tensors with one row per data rank, and a
frozen :class:`Packing` says how to read them::

    weight  [shards, matrices * blocks * 32]     32 bytes = one block of 64 values
    scales  [shards, matrices * scale_bytes]     float32 per block; with double quantization
                                                 [float32 per 256 blocks | float32 mean | byte per block]

Row ``s`` was read and quantized by data rank ``s``: rows, columns or full matrices of the weight. The gathered rows are
the weight that all data ranks compute with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ..._compat.bitsandbytes import functional
from ..._compat.torch import own_parameters
from ...plan.quantized import BLOCK, OUTER_BLOCK, packed_scale_bytes


@dataclass(frozen=True)
class Packing:
    """The layout of a packed weight's bytes.

    Attributes:
        shape: ``[matrices, rows, columns]`` of the gathered weight; a projection is one matrix.
        quant_type: ``nf4`` or ``fp4``.
        double: whether the scales are quantized too.
        dtype: the dtype it was quantized from.
        compute_dtype: the dtype that experts compute in; a projection knows its own.
        shards: number of data ranks that shard it.
        dim: the dim of ``shape`` that they shard.
    """

    shape: tuple[int, int, int]
    quant_type: str
    double: bool
    dtype: torch.dtype
    compute_dtype: torch.dtype
    shards: int = 1
    dim: int = 1

    @property
    def chunk(self) -> tuple[int, int, int]:
        """The shape of the largest shard."""
        sizes = list(self.shape)
        sizes[self.dim] = ceil(sizes[self.dim] / self.shards)
        return sizes[0], sizes[1], sizes[2]

    @property
    def blocks(self) -> int:
        """The number of blocks of one matrix of a shard."""
        return ceil(self.chunk[1] * self.chunk[2] / BLOCK)

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scales of one matrix of a shard, a multiple of 4."""
        return packed_scale_bytes(self.blocks, self.double)

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The shape of the gathered packed bytes."""
        return self.shards, self.chunk[0] * self.blocks * BLOCK // 2

    @property
    def scales_shape(self) -> tuple[int, int]:
        """The shape of the gathered bytes of the scales."""
        return self.shards, self.chunk[0] * self.scale_bytes

    @property
    def is_one_stream(self) -> bool:
        """Return whether the gathered bytes are those of one matrix, quantized as one sequence of blocks."""
        if self.shape[0] != 1:
            return False
        return self.shards == 1 or (self.dim == 1 and self.chunk[1] * self.chunk[2] % BLOCK == 0)


def pack(share: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Quantize one data rank's shard.

    Args:
        share: ``[matrices, rows, columns]`` in 16 or 32 bits; no larger than ``packing.chunk``.

    Returns:
        one row of the packed bytes and one of the bytes of the scales, ``[1, ...]`` each, ``uint8``.
    """
    missing = packing.chunk[2] - share.shape[2]
    share = F.pad(share, (0, missing)) if missing else share
    weight = torch.zeros((packing.chunk[0], packing.blocks * BLOCK // 2), dtype=torch.uint8, device=share.device)
    scales = torch.zeros((packing.chunk[0], packing.scale_bytes), dtype=torch.uint8, device=share.device)
    for number, matrix in enumerate(share):
        if not matrix.numel():
            continue
        packed, state = functional().quantize_4bit(
            matrix.contiguous(),
            blocksize=BLOCK,
            compress_statistics=packing.double,
            quant_type=packing.quant_type,
            quant_storage=torch.uint8,
        )
        weight[number, : packed.numel()] = packed.view(-1)
        if not packing.double:
            _write(scales[number], 0, state.absmax)
            continue
        mean = 4 * ceil(packing.blocks / OUTER_BLOCK)
        _write(scales[number], 0, state.state2.absmax)
        _write(scales[number], mean, state.offset.float().view(1))
        _write(scales[number], mean + 4, state.absmax)
    return weight.view(1, -1), scales.view(1, -1)


def _write(row: Tensor, start: int, values: Tensor) -> None:
    found = values.reshape(-1).contiguous().view(torch.uint8)
    row[start : start + found.numel()] = found


def unpack_state(weight: Tensor, scales: Tensor, packing: Packing) -> tuple[Tensor, Any]:
    """Return packed bytes ``[n, 1]`` and bitsandbytes' ``QuantState`` of a weight that is one contiguous matrix."""
    _, rows, columns = packing.shape
    size = rows * columns
    state = _state(read_scales(scales, packing).view(-1)[: ceil(size / BLOCK)], packing, (rows, columns))
    return as_bytes(weight).view(-1, 1)[: ceil(size / 2)], state


def unpack(weight: Tensor, scales: Tensor, packing: Packing, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantize the weight ``[matrices, rows, columns]`` from its gathered bytes.

    Args:
        dtype: the dtype to dequantize to; by default the one it was quantized from.
    """
    if packing.is_one_stream:
        packed, state = unpack_state(weight, scales, packing)
    else:
        chunk = (packing.shards * packing.chunk[0], packing.blocks * BLOCK)
        packed = as_bytes(weight).view(-1, 1)
        state = _state(read_scales(scales, packing).view(-1), packing, chunk)
    state.dtype = dtype or packing.dtype
    values: Tensor = functional().dequantize_4bit(packed, state)
    if packing.is_one_stream:
        return values.view(packing.shape)
    matrices, rows, columns = packing.chunk
    parts = values.view(packing.shards, matrices, -1)[..., : rows * columns].reshape(-1, *packing.chunk)
    if packing.shards == 1:
        return parts[0]
    joined = parts.movedim(0, packing.dim).flatten(packing.dim, packing.dim + 1)
    return joined.narrow(packing.dim, 0, packing.shape[packing.dim])


def read_scales(scales: Tensor, packing: Packing) -> Tensor:
    """Return one float32 scale per block, ``[shards * matrices, blocks]``."""
    rows = as_bytes(scales).view(-1, packing.scale_bytes)
    if not packing.double:
        return rows.view(torch.float32)
    mean = 4 * ceil(packing.blocks / OUTER_BLOCK)
    outer = rows[:, :mean].contiguous().view(torch.float32)
    means = rows[:, mean : mean + 4].contiguous().view(torch.float32)
    bytes_of_blocks = rows[:, mean + 4 : mean + 4 + packing.blocks].contiguous()
    code = _code(rows.device)
    found = [
        functional().dequantize_blockwise(bytes_of_blocks[row], absmax=outer[row], code=code, blocksize=OUTER_BLOCK)
        for row in range(len(rows))
    ]
    return torch.stack(found) + means


def as_bytes(tensor: Tensor) -> Tensor:
    """Return plain bytes; mixed precision may have cast them to floats (0 to 255 are exact in bfloat16)."""
    plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return plain if plain.dtype == torch.uint8 else plain.to(torch.uint8)


def gathered(tensor: Tensor) -> Tensor:
    """Return the bytes of all data ranks, gathered if necessary; every data rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _state(absmax: Tensor, packing: Packing, shape: tuple[int, int]) -> Any:
    return functional().QuantState(
        absmax=absmax,
        shape=torch.Size(shape),
        code=_code_of_4_bits(packing.quant_type, absmax.device),
        blocksize=BLOCK,
        quant_type=packing.quant_type,
        dtype=packing.dtype,
    )


@cache  # it is copied from a list, which syncs with the device, and every product needs it
def _code_of_4_bits(quant_type: str, device: torch.device) -> Tensor:
    """Return the values of the 4-bit codes."""
    code: Tensor = functional().get_4bit_type(quant_type, device=device)
    return code


@cache
def _code(device: torch.device) -> Tensor:
    """Return bitsandbytes' values of 8-bit codes, for quantized scales."""
    code: Tensor = functional().create_dynamic_map().to(device)
    return code


_PACKINGS = "_packings"
_SCALES = "scales"


def packings_of(module: nn.Module) -> dict[str, Packing]:
    """Return the packings of a module's packed parameters, by name; the scales of each are in :func:`scales_name`."""
    found: dict[str, Packing] = module.__dict__.get(_PACKINGS, {})
    return found


def scales_name(name: str) -> str:
    """Return the name of the parameter that holds a packed parameter's scales."""
    return _SCALES if name == "weight" else f"{name}_{_SCALES}"


def register_packed(module: nn.Module, name: str, packing: Packing) -> None:
    """Give ``module`` a packed parameter ``name`` and its scales, on the meta device."""
    module.__dict__.setdefault(_PACKINGS, {})[name] = packing
    for key, shape in ((name, packing.weight_shape), (scales_name(name), packing.scales_shape)):
        empty = torch.empty(shape, dtype=torch.uint8, device="meta")
        own_parameters(module)[key] = nn.Parameter(empty, requires_grad=False)
    mark(module)


def forget_packed(module: nn.Module, name: str) -> None:
    """Undo :func:`register_packed`; the caller puts the original parameter back."""
    packings_of(module).pop(name, None)
    own_parameters(module).pop(scales_name(name), None)


def mark(module: nn.Module) -> None:
    """Set the attributes of packed weights that PEFT reads from stock ones."""
    for name, packing in packings_of(module).items():
        parameter: Any = own_parameters(module)[name]
        parameter.quant_type, parameter.compress_statistics = packing.quant_type, packing.double


@contextmanager
def shown_unpacked(model: nn.Module) -> Iterator[None]:
    """Replace packed experts inside the `with` block by meta parameters of the unpacked shape, for PEFT."""
    kept = []
    for module in model.modules():
        for name, packing in packings_of(module).items():
            if name != "weight":
                kept.append((module, name, own_parameters(module)[name]))
                empty = torch.empty(packing.shape, dtype=packing.dtype, device="meta")
                own_parameters(module)[name] = nn.Parameter(empty, requires_grad=False)
    try:
        yield
    finally:
        for module, name, packed in kept:
            own_parameters(module)[name] = packed


def read_packed(module: nn.Module, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantize a packed parameter of ``module`` to ``[matrices, rows, columns]``; its bytes must be gathered."""
    parameters: Any = own_parameters(module)
    return unpack(parameters[name], parameters[scales_name(name)], packings_of(module)[name], dtype)
