"""Quantize a weight again in the quantization format of its checkpoint.

A block whose values still equal the checkpoint's dequantized values keeps its codes and its scale, so unchanged blocks
are written byte for byte, in every format. For any other block, the scale is computed from its new values, and the
codes from values and scale, with the rules of the format's own quantizers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.stored_forms.arithmetic import powers_of_two, scaled_twice
from ...checkpoint.stored_forms.forms import as_plain
from ...checkpoint.stored_forms.scheme import READ, StoredForm
from ...checkpoint.written_form import PlainForm
from ...distributed.files.dequantized import Along, DequantizedOnDisk
from ...distributed.files.reader import Box
from ...distributed.files.sources import open_weights
from ...distributed.files.writer import Shaped
from ...errors import CheckpointError, ConfigError

ENCODED = READ[:4]
"""Names of the quantization methods in which hfscale can write weights."""
_ENTRIES = 1 << 20  # entries that are quantized at a time, if blocks are not larger
_FLOAT8 = 448.0
_E2M1 = 6.0
_OWN = {"values", "scales", "zeros"}  # stored tensors that have entries for each block


@dataclass(frozen=True)
class Codes:
    """Hold a quantized matrix in blocks of ``height`` by ``width`` codes: codes ``[rows, height, columns, width]``,
    with one scale (and zero point) per block, ``[rows, columns]``, where ``rows`` and ``columns`` count blocks.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None


class QuantizedAgain(PlainForm):
    """Quantize the tensors of an unquantized checkpoint again, like the quantized checkpoint in ``directory``, whose
    quantization format is ``form``. Raise :class:`ConfigError` for a format that hfscale can read, but not write.
    """

    def __init__(self, directory: Path, form: StoredForm) -> None:
        if form.method not in ENCODED:
            raise ConfigError(
                f"the option 'as_stored' can write only the formats {', '.join(ENCODED)}, but the checkpoint is in "
                f"{form.method}: leave this option out to save dequantized weights"
            )
        self.form = form
        self._stored = open_weights(directory)
        plain = as_plain(self._stored, form)
        self._weights = {
            key: tensor for key, tensor in plain.items() if isinstance(tensor, DequantizedOnDisk)
        }

    def layout(self, plain: Mapping[str, Any]) -> dict[str, Shaped]:
        """Return the shape and dtype of every tensor that a save writes for ``plain``, the model's dequantized tensors
        by name. Raise :class:`CheckpointError` if a quantized weight of the checkpoint has another name in the model.
        """
        result: dict[str, Shaped] = {}
        strange = [key for key in plain if key not in self._weights and key not in self._stored]
        lost = [key for key in self._weights if key not in plain]
        if strange and lost:
            raise CheckpointError(
                f"the checkpoint that the model was loaded from stores {lost[0]} quantized, but the model saves "
                f"{strange[0]} instead of a tensor of that name: save the model dequantized, without quantization="
            )
        for key, tensor in plain.items():
            if key in self._weights:
                parts = self._weights[key].stored_as
                result |= {name: source for name, (_, source) in parts.items()}
            else:
                kept = self._stored.get(key, tensor).dtype
                result[key] = tensor if tensor.dtype == kept else tensor.to(kept)
        return result

    def made_of(self, key: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return, by name, the tensors that a save writes for the model's tensor ``key``: values and scales if the
        checkpoint stores this weight quantized, otherwise only ``tensor``.
        """
        if key not in self._weights:
            return {key: tensor.to(self._stored[key].dtype) if key in self._stored else tensor}
        weight = self._weights[key]
        made = encode(weight, tensor.detach().cpu())
        return {
            name: source[...] if part not in made else made[part].view(source.shape)
            for name, (part, source) in weight.stored_as.items()
        }


def encode(weight: DequantizedOnDisk, value: Tensor) -> dict[str, Tensor]:
    """Quantize ``value``, the new values of a stored weight, in the weight's format; return its stored tensors by name
    (``values``, ``scales``, ...). Raise :class:`CheckpointError` if the shape has changed.
    """
    if tuple(value.shape) != weight.shape:
        raise CheckpointError(
            f"a quantized weight has the shape {weight.shape} in the checkpoint, but {tuple(value.shape)} in the "
            "model: save the model dequantized, without quantization="
        )
    parts = weight.parts
    made = {
        name: torch.empty(parts[name].source.shape, dtype=parts[name].source.dtype)
        for name in _OWN & parts.keys()
    }
    stored = value.transpose(-1, -2) if weight.transposed else value
    matrices = stored.reshape(-1, *stored.shape[-2:])
    rows, columns = matrices.shape[1:]
    unit = lcm(*(min(parts[name].rows.entries, rows) for name in made))
    step = max(1, _ENTRIES // (columns * unit)) * unit
    # Compute a new tensor scale if the blocks' scales no longer fit into 8 bits under the old tensor scale.
    whole: Tensor | None = None
    if "whole" in parts:
        most = value.abs().max().float()
        old = parts["whole"].source[...].float()
        if not (
            most / _E2M1 * old <= _FLOAT8 * 1.03
        ).all():  # tolerance for values that are rounded to the largest scale
            whole = (_FLOAT8 * _E2M1 / most).expand_as(old).clone()
            made["whole"] = whole.view(parts["whole"].source.shape)
    for index, matrix in zip(product(*map(range, value.shape[:-2])), matrices, strict=True):
        for first in range(0, rows, step):
            span = (first, min(first + step, rows))
            spans = (*((place, place + 1) for place in index), span, (0, columns))
            for name, words in _encode_rows(weight, spans, matrix[slice(*span)], whole).items():
                box = parts[name].box(spans)
                made[name][tuple(slice(*edges) for edges in box)] = words.view(
                    [stop - start for start, stop in box]
                )
    return made


def _encode_rows(
    weight: DequantizedOnDisk, spans: Box, now: Tensor, whole: Tensor | None
) -> dict[str, Tensor]:
    """Quantize ``now``, the new values of a weight's slice ``spans``; return its stored tensors by name (``values``,
    ``scales``, ...). ``whole`` is the new scale of the full tensor, or ``None`` if this scale has not changed.
    """
    parts = weight.parts
    columns = now.shape[1]
    scales = parts["scales"]
    words = {name: parts[name].source.read(parts[name].box(spans)) for name in _OWN & parts.keys()}
    found = {name: part.read(spans) for name, part in parts.items()}
    read = {name: entries.view(entries.shape[-2:]) for name, entries in found.items()}
    same = weight.arithmetic(read, now.dtype) == now
    if weight.if_merged is not None:
        same |= weight.if_merged(read, now.dtype) == now
    height = min(scales.rows.entries, len(now))
    width = min(scales.columns.entries, columns)
    kept = _blocks(same, height, width, True).all(3).all(1)
    kept &= whole is None
    if kept.all():
        return words
    if prod(scales.source.shape[:-2]) < prod(weight.shape[:-2]):
        raise CheckpointError(
            "several matrices share one quantization scale in the checkpoint, but their values have changed since: "
            "save the model dequantized, without quantization="
        )
    old = Codes(
        _blocks(read["values"], height, width),
        words["scales"].view(words["scales"].shape[-2:]),
        _blocks(read["zeros"].expand(now.shape), height, width)[:, 0, :, 0]
        if "zeros" in read
        else None,
    )
    new = _quantized(
        weight,
        _blocks(now.float(), height, width),
        old,
        read.get("whole") if whole is None else whole,
    )
    codes = torch.where(kept[:, None, :, None], _bytes(old.values), _bytes(new.values))
    codes = codes.flatten(2).flatten(0, 1)[: len(now), :columns]
    result = {
        "values": _words(
            codes.view(old.values.dtype), parts["values"].columns, words["values"].dtype
        ),
        "scales": torch.where(kept, _bytes(old.scales), _bytes(new.scales)).view(old.scales.dtype),
    }
    if old.zeros is not None and new.zeros is not None:
        zeros = torch.where(kept, old.zeros, new.zeros.to(old.zeros.dtype))
        zeros = (
            zeros
            if parts["zeros"].rows.unpack is None
            else zeros.repeat_interleave(height, 0)[: len(now)]
        )
        result["zeros"] = _words(zeros.T, parts["zeros"].rows, words["zeros"].dtype).T.contiguous()
    return result


def _blocks(tensor: Tensor, height: int, width: int, fill: bool = False) -> Tensor:
    """Return a matrix as blocks ``[rows, height, columns, width]``, padded with ``fill`` at its lower and right
    edges.
    """
    down = -tensor.shape[0] % height
    across = -tensor.shape[1] % width
    whole = torch.nn.functional.pad(tensor, (0, across, 0, down), value=fill)
    return whole.unflatten(1, (-1, width)).unflatten(0, (-1, height))


def _quantized(
    weight: DequantizedOnDisk, blocks: Tensor, like: Codes, whole: Tensor | None
) -> Codes:
    """Quantize float32 values to the dtypes of the old codes and scales ``like``. The values are blocks of a matrix,
    ``[rows, height, columns, width]``, where ``rows`` and ``columns`` count blocks. ``whole`` is the scale of the full
    tensor, if the format has one.
    """
    most = blocks.abs().amax((1, 3))
    if like.values.dtype.is_floating_point:
        return _float8(blocks, most, like)
    if weight.arithmetic is scaled_twice and whole is not None:
        scales = (most / _E2M1 * whole).clamp(max=_FLOAT8).to(like.scales.dtype)
        return Codes(_e2m1(blocks, scales.to(torch.bfloat16) / whole), scales)
    if weight.arithmetic in (scaled_twice, powers_of_two) or like.values.dtype == torch.uint8:
        exponents = (torch.where(most > 0, most, 1.0).log2().floor() - 2).clamp(-127, 127)
        return Codes(_e2m1(blocks, exponents.exp2()), _power(exponents, like.scales.dtype))
    columns = weight.parts["values"].columns
    top = 2 ** (32 * columns.words // columns.entries - 1) if columns.unpack is not None else 128
    return _integers(blocks, most, top, like)


def _float8(blocks: Tensor, most: Tensor, like: Codes) -> Codes:
    """Quantize blocks to 8-bit floating point, like transformers' quantizer on a GPU. ``most`` is the largest absolute
    value of each block; ``like`` has the dtypes of codes and scales.
    """
    top = torch.finfo(like.values.dtype).max
    kind = like.scales.dtype
    factor = torch.where(most > 0, top / torch.where(most > 0, most, 1.0), 1.0)
    scales = (1.0 / factor).to(torch.float32)
    if kind in (torch.uint8, torch.float8_e8m0fnu):
        exponents = scales.clamp(min=torch.finfo(torch.float32).tiny).log2().ceil()
        factor = (-exponents).exp2()
        scales = _power(exponents, kind)
    elif kind != torch.float32:
        scales = scales.to(kind)
        factor = 1.0 / scales.float()
    codes = (blocks * factor[:, None, :, None]).clamp(-top, top)
    return Codes(codes.to(like.values.dtype), scales)


def _integers(blocks: Tensor, most: Tensor, top: int, like: Codes) -> Codes:
    """Quantize blocks to integers from ``-top`` to ``top - 1``, like compressed-tensors. ``most`` is the largest
    absolute value of each block; ``like`` has the dtypes of codes and scales.
    """
    if like.zeros is None:
        scales = most / (top - 0.5)
        zeros = torch.zeros_like(most)
    else:
        least = blocks.amin((1, 3)).clamp(max=0)
        greatest = blocks.amax((1, 3)).clamp(min=0)
        scales = (greatest - least) / (2 * top - 1)
        zeros = (-top - least / torch.where(scales > 0, scales, 1.0)).round().clamp(-top, top - 1)
    scales = torch.where(scales > 0, scales, 1.0).to(like.scales.dtype)
    codes = (
        (blocks / scales.float()[:, None, :, None] + zeros[:, None, :, None])
        .round()
        .clamp(-top, top - 1)
    )
    return Codes(codes.to(like.values.dtype), scales, None if like.zeros is None else zeros)


def _e2m1(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the 4-bit E2M1 code nearest to each value of ``blocks`` divided by its block's scale. If two codes are
    equally near, return the even code.
    """
    scales = torch.where(scales > 0, scales.float(), 1.0)[:, None, :, None]
    size = (blocks / scales).abs()
    codes = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    codes = codes + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return codes + 8 * blocks.signbit().to(torch.uint8)


def _power(exponents: Tensor, kind: torch.dtype) -> Tensor:
    return (exponents + 127).to(torch.uint8) if kind == torch.uint8 else exponents.exp2().to(kind)


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor of 8-bit floating-point numbers as ``uint8``, because ``torch.where`` supports no 8-bit floats;
    return any other tensor unchanged.
    """
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _words(codes: Tensor, along: Along, kind: torch.dtype) -> Tensor:
    """Pack integer ``codes`` along their last dim into words of dtype ``kind``, the inverse of the unpacking that
    ``along`` describes.
    """
    if along.unpack is None:
        return codes
    if kind != torch.int32:
        return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).view(kind)
    bits = 32 * along.words // along.entries
    length = -(-codes.shape[-1] * bits // 32)
    stream = torch.nn.functional.pad(
        codes.long() + (1 << bits - 1), (0, -codes.shape[-1] % along.entries)
    )
    units = stream.unflatten(-1, (-1, along.entries))
    words = units.new_zeros((*units.shape[:-1], along.words + 1))
    for entry in range(along.entries):
        word, shift = divmod(entry * bits, 32)
        wide = units[..., entry] << shift
        words[..., word] |= wide & 0xFFFFFFFF
        words[..., word + 1] |= wide >> 32
    whole = words[..., :-1].flatten(-2)[..., :length]
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()
