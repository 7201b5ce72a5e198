"""Dequantize stored weights with the same operations, in the same order, as transformers' own dequantization.

Every function takes the stored tensors that belong to a slice of the weight, by their names ``values``, ``scales``,
``zeros`` (zero points) and ``whole`` (a single scale of the full tensor), and the dtype of the result. The shapes of
these tensors broadcast. The order and dtype of each operation are the same as in transformers, so that results are
equal bit by bit.
"""

from collections.abc import Mapping
from functools import cache, partial
from math import gcd

import torch
from torch import Tensor

from ...distributed.files.dequantized import Along

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_ONE_127TH = 7.874015718698502e-3

Parts = Mapping[str, Tensor]


def blocks_in_float32(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Dequantize 8-bit floating-point numbers or 4-bit integers: multiply them by their blocks' scales, in float32."""
    scales = parts["scales"]
    scales = (scales.float() - 127.0).exp2() if scales.dtype == torch.uint8 else scales.float()
    return (_numbers(parts["values"], torch.float32) * scales).to(dtype)


def rows_of_a_table(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Dequantize numbers: cast them and their scales to the result's dtype, then multiply, as transformers' quantized
    embeddings do at each look-up.
    """
    return parts["values"].to(dtype) * parts["scales"].to(dtype)


def in_type_of_result(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Dequantize integers like torchao: subtract zero points in the result's dtype, then multiply by scales in the
    scales' dtype.
    """
    values = parts["values"].to(dtype)
    if "zeros" in parts:
        values = values - parts["zeros"].to(dtype)
    return (values * parts["scales"]).to(dtype)


def shares_of_the_largest(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Dequantize 8-bit integers: multiply them by the largest absolute value of their row and by 1/127, in float32
    (LLM.int8(), Dettmers et al. 2022).
    """
    return (parts["values"] * parts["scales"] * _ONE_127TH).to(dtype)


def powers_of_two(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Dequantize 4-bit floating-point numbers (E2M1): multiply them by scales that are powers of two, in the result's
    dtype (OCP microscaling formats, 2023).
    """
    return torch.ldexp(
        _numbers(parts["values"], dtype),
        parts["scales"].int() - 127,
    ).to(dtype)


def in_type_of_scales(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Dequantize numbers: subtract their zero points, if any, then multiply by their blocks' scales, both in the
    scales' dtype.
    """
    scales = parts["scales"]
    if scales.dtype == torch.uint8:
        scales = _powers(scales)
    values = parts["values"].to(scales.dtype)
    if "zeros" in parts:
        values = values - parts["zeros"].to(scales.dtype)
    return (values * scales).to(dtype)


def scaled_twice(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Dequantize 4-bit floating-point numbers (E2M1, as in NVFP4 and MXFP4): multiply them by their block's scale,
    divided by the full tensor's scale if there is one, and round to bfloat16.
    """
    scales = parts["scales"]
    scales = _powers(scales) if scales.dtype == torch.uint8 else scales.to(torch.bfloat16)
    if "whole" in parts:
        scales = scales / parts["whole"]
    values = _numbers(parts["values"], torch.bfloat16).to(scales.dtype)
    return (values * scales).to(torch.bfloat16).to(dtype)


def _powers(exponents: Tensor) -> Tensor:
    return 2.0 ** (exponents.int() - 127).to(torch.bfloat16)


def _numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``codes`` to numbers in ``dtype``: integers are 4-bit E2M1 codes, which are looked up; floating-point
    numbers are only cast.
    """
    if codes.dtype.is_floating_point:
        return codes.to(dtype)
    return _e2m1(dtype, codes.device)[codes.int()]


@cache  # cached, because creating it from a list synchronizes with the device
def _e2m1(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(_E2M1, dtype=dtype, device=device)


@cache  # equal arguments return the same object
def two_per_byte() -> Along:
    """Describe how a stored tensor packs a weight: each byte holds two neighbouring 4-bit codes, the first one in the
    lower half.
    """
    return Along(2, 1, _halves)


def _halves(words: Tensor) -> Tensor:
    codes = words.contiguous().view(torch.uint8)
    return torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2)


@cache
def codes_in_bytes(bits: int) -> Along:
    """Describe how a stored tensor packs a weight: each byte holds several integers of 2 or 4 bits, shifted to unsigned
    numbers, the first integer in the lowest bits.
    """
    return Along(8 // bits, 1, partial(_numbers_in_bytes, bits=bits))


def _numbers_in_bytes(words: Tensor, bits: int) -> Tensor:
    codes = words.contiguous().view(torch.uint8).unsqueeze(-1)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    found = (codes >> shifts & (1 << bits) - 1).to(torch.int8) - (1 << bits - 1)
    return found.flatten(-2)


@cache
def codes_in_int32(bits: int) -> Along:
    """Describe how a stored tensor packs a weight: int32 words hold integers of ``bits`` bits, shifted to unsigned
    numbers, without gaps.
    """
    words = bits // gcd(bits, 32)
    return Along(32 * words // bits, words, partial(_codes_of, bits=bits, words=words))


def _codes_of(stored: Tensor, bits: int, words: int) -> Tensor:
    missing = -stored.shape[-1] % words  # the last unit of a row may be incomplete
    units = (
        torch.nn.functional.pad(stored, (0, missing)).unflatten(-1, (-1, words)).long() & 0xFFFFFFFF
    )
    starts = torch.arange(32 * words // bits, device=stored.device) * bits
    first = starts // 32
    shift = starts % 32
    pairs = units[..., first] | units[..., (first + 1).clamp(max=words - 1)] << 32
    return ((pairs >> shift & (1 << bits) - 1) - (1 << bits - 1)).flatten(-2)
