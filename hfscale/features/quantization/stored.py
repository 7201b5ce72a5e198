"""Read this rank's shard of weights that bitsandbytes stored in 4 bits.

A stored weight is packed bytes, two values in each, with one scale per 64 values (QLoRA, Dettmers et al. 2023). If the
blocks of a shard are blocks of the full weight (:mod:`hfscale.plan.quantized`), the shard consists of spans of the
bytes and of the scales, and nothing is quantized again. Scales that are quantized too are read in full, since their
blocks and mean belong to the full weight, and kept in float32.
"""

import json
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..._compat.bitsandbytes import functional
from ...distributed.files.reader import TensorOnDisk
from ...distributed.files.slices import PartOnDisk
from ...distributed.ops.four_bit import FourBitPacking, split_row
from ...errors import CheckpointError
from ...plan import ParameterPlan
from ...plan.cut import share_spans
from ...plan.quantized import BLOCK

_STATE = ".quant_state.bitsandbytes__"
_BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class PackedOnDisk:
    """Read one weight ``[out, in]`` that is stored in 4 bits, ``nf4`` or ``fp4``, on demand; ``dtype`` is the one it
    was quantized from. Raise :class:`CheckpointError` if its blocks are not of 64 values.
    """

    def __init__(self, key: str, stored: Mapping[str, TensorOnDisk]) -> None:
        self._key, self._weight = key, stored[key]
        self._beside = {name: stored[f"{key}.{name}"] for name in _BESIDE if f"{key}.{name}" in stored}
        state = next(name for name in stored if name.startswith(key + _STATE))
        self._state: dict[str, Any] = json.loads(bytes(stored[state][...].tolist()))
        self.kind = state.rpartition("__")[2]
        self.shape = tuple(self._state["shape"])
        self.dtype: torch.dtype = getattr(torch, self._state["dtype"])
        if self._state["blocksize"] != BLOCK:
            raise CheckpointError(
                f"{key} is stored in blocks of {self._state['blocksize']} values, and hfscale reads blocks of {BLOCK}: "
                "use a checkpoint with 16-bit weights and quantization_config="
            )

    def share(self, planned: ParameterPlan, transposed: bool, ranks: dict[str, int]) -> tuple[Tensor, Tensor]:
        """Return packed bytes ``[n]`` and float32 scales ``[blocks]`` of the shard at ``ranks``, whose blocks align."""
        spans = share_spans(planned.shape, planned.cuts, ranks)
        down, across = spans[::-1] if transposed else spans
        rows, columns = self.shape
        scales = self._scales()
        flat = copy(self._weight)
        flat.dtype = torch.uint8
        if across == [(0, columns)]:
            runs = [(start * columns, stop * columns) for start, stop in down]
            flat.shape = (-(-rows * columns // 2),)
            part = PartOnDisk(flat, [[(start // 2, -(-stop // 2)) for start, stop in runs]])[...]
            return part, torch.cat([scales[start // BLOCK : -(-stop // BLOCK)] for start, stop in runs])
        flat.shape = (rows, columns // 2)
        part = PartOnDisk(flat, [down, [(start // 2, stop // 2) for start, stop in across]])[...]
        places = torch.cat([torch.arange(start, stop) for start, stop in down])
        blocks = torch.cat([torch.arange(start // BLOCK, stop // BLOCK) for start, stop in across])
        return part.flatten(), scales.view(rows, -1)[places][:, blocks].flatten()

    def _scales(self) -> Tensor:
        """Return all scales of the full weight."""
        stored = self._beside["absmax"][...]
        if "nested_absmax" not in self._beside:
            return stored.float()
        outer, code = self._beside["nested_absmax"][...], self._beside["nested_quant_map"][...]
        size = self._state["nested_blocksize"]
        scales: Tensor = functional().dequantize_blockwise(stored, absmax=outer, code=code, blocksize=size)
        return scales + torch.tensor(float(self._state["nested_offset"]))


def split_packed(stored: dict[str, TensorOnDisk]) -> tuple[dict[str, TensorOnDisk], dict[str, PackedOnDisk]]:
    """Return the stored tensors without the quantization states, and the packed weights by key."""
    keys = [name.rpartition(_STATE)[0] for name in stored if _STATE in name]
    packed = {key: PackedOnDisk(key, stored) for key in keys}
    states = {name for name in stored if _STATE in name}
    beside = {f"{key}.{name}" for key in keys for name in _BESIDE} | states
    return {name: tensor for name, tensor in stored.items() if name not in beside}, packed


def check_row(packing: FourBitPacking, name: str) -> None:
    """Raise CheckpointError if :func:`fill_row` cannot fill the rows of all data ranks: uneven shards of columns."""
    if packing.dim == 2 and packing.shape[2] % packing.shards:
        raise CheckpointError(
            f"{name} has {packing.shape[2]} columns, which do not divide evenly over {packing.shards} data ranks: "
            "use another dp_shard_size, or a checkpoint with 16-bit weights and quantization_config="
        )


def fill_row(weight: Tensor, scales: Tensor, packing: FourBitPacking) -> Tensor:
    """Return one data rank's row of bytes, from stored ones; see :func:`...distributed.ops.four_bit.pack`."""
    row = weight.new_zeros((1, packing.row_shape[1]))
    packed, beside = split_row(row, packing)
    packed[0, : weight.numel()] = weight
    beside[0, : 4 * scales.numel()] = scales.contiguous().view(torch.uint8)
    return row
