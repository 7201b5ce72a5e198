"""Multiply 16-bit activations with an adapter's thin 32-bit factors, and sum the products in 32 bits.

PEFT keeps adapter factors in float32 next to a base model in bfloat16. It casts activations to float32 and multiplies
them without tensor cores. Here no float32 copy of the activations is made. On a GPU, each entry of a float32 factor is
split into three bfloat16 numbers whose sum has all 24 bits, and the tensor cores sum their products in float32::

    x f = x f1 + x f2 + x f3                            one product with [f1 f2 f3]; x is in bfloat16 already
    t f = t1 (f1 + f2 + f3) + t2 (f1 + f2) + t3 f1      one product of width 6r; the rest is below float32's bits

On other devices, custom operators cast the activations in blocks of rows that fit into the caches. Tensors of equal
dtypes are multiplied directly.

Shapes: ``wide [n, m]`` is an activation or its gradient, and ``thin [n, r]`` its product with a factor of rank ``r``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..._compat.torch_device import widens_products
from .fused import fused

_BLOCK = 1 << 20  # entries of ``wide`` that are cast at once
_TINY = 1 << 14  # with fewer entries, calling a custom operator takes longer than its computation
_SCHEMAS = {
    "to_thin": "(Tensor wide, Tensor factor, float scale) -> Tensor",
    "add_from_thin": "(Tensor(a!) wide, Tensor thin, Tensor factor) -> ()",
    "thin_gradient": "(Tensor thin, Tensor wide, bool transposed) -> Tensor",
}


def to_thin(wide: Tensor, factor: Tensor, scale: float) -> Tensor:
    """Return ``scale * wide @ factor``, ``[n, r]``, in the dtype of ``factor [m, r]``."""
    if splits(wide, factor):
        return _scaled_sum(wide_product(wide, in_three(factor, 1)), 1, scale)
    if torch.compiler.is_compiling():
        return wide.to(factor.dtype).mm(factor) * scale
    if wide.dtype == factor.dtype:
        out = factor.new_empty((len(wide), factor.shape[1]))
        return out.addmm_(
            wide, factor, beta=0, alpha=scale
        )  # beta=0: uninitialized memory is not read
    if wide.numel() < _TINY:
        return _to_thin(wide, factor, scale)
    thin: Tensor = _by_blocks().to_thin(wide, factor, scale)
    return thin


def add_from_thin(wide: Tensor, thin: Tensor, factor: Tensor) -> Tensor:
    """Add ``thin @ factor`` to ``wide`` in place, rounding once; ``thin`` and ``factor [r, m]`` have the same dtype."""
    if wide.dtype == thin.dtype:
        return wide.addmm_(thin, factor)
    if splits(wide, thin):
        return _add_wide(wide, _paired(thin, 1, _OF_THIN), _paired(factor, 0, _OF_FACTOR))
    if wide.numel() < _TINY:
        _add_from_thin(wide, thin, factor)
    else:
        _by_blocks().add_from_thin(wide, thin, factor)
    return wide


def with_from_thin(wide: Tensor, thin: Tensor, factor: Tensor) -> Tensor:
    """Return ``wide + thin @ factor``, rounded once, in new memory, for compiled code."""
    if wide.dtype == thin.dtype:
        return wide.addmm(thin, factor)
    if splits(wide, thin):
        return wide.addmm(_paired(thin, 1, _OF_THIN), _paired(factor, 0, _OF_FACTOR))
    return (wide + thin.mm(factor)).to(wide.dtype)


def from_thin(thin: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``thin @ factor`` in ``dtype``."""
    if thin.dtype == dtype:
        return thin.mm(factor)
    if torch.compiler.is_compiling():
        if splits_for(dtype, thin):
            return _paired(thin, 1, _OF_THIN).mm(_paired(factor, 0, _OF_FACTOR))
        return thin.mm(factor).to(dtype)
    return add_from_thin(thin.new_zeros((len(thin), factor.shape[1]), dtype=dtype), thin, factor)


def thin_gradient(thin: Tensor, wide: Tensor, transposed: bool = False) -> Tensor:
    """Return a factor's gradient ``thin.T @ wide [r, m]`` (``[m, r]`` if ``transposed``) in the dtype of ``thin``."""
    if wide.dtype == thin.dtype:
        return wide.t().mm(thin) if transposed else thin.t().mm(wide)
    if splits(wide, thin):
        pieces = in_three(thin, 1)
        if transposed:
            return _scaled_sum(wide_product(wide.t(), pieces), 1, 1.0)
        return _scaled_sum(wide_product(pieces.t(), wide), 0, 1.0)
    if torch.compiler.is_compiling():
        return thin_gradient(thin, wide.to(thin.dtype), transposed)
    if wide.numel() < _TINY:
        return _thin_gradient(thin, wide, transposed)
    gradient: Tensor = _by_blocks().thin_gradient(thin, wide, transposed)
    return gradient


def splits(wide: Tensor, factor: Tensor) -> bool:
    """Return whether a float32 ``factor`` is split into bfloat16 terms to be multiplied with ``wide``."""
    return splits_for(wide.dtype, factor)


def splits_for(dtype: torch.dtype, factor: Tensor) -> bool:
    """Return whether float32 factors on the device of ``factor`` are split into bfloat16 terms, to be multiplied with
    activations in ``dtype``.
    """
    types = dtype, factor.dtype
    return widens_products(factor.device) and types == (torch.bfloat16, torch.float32)


_HALF = 1 << 15
_UPPER = -1 << 16
"""Constants that round a float32 to bfloat16 by bit operations: half of the last kept bit, which is added, and the mask
of the bits to keep.
"""

_OF_THIN = (0, 0, 0, 1, 1, 2)
_OF_FACTOR = (0, 1, 2, 0, 1, 0)
"""Which terms the six products multiply: both operands are sums of three bfloat16 terms, numbered from the largest on.
The other three products of terms are too small to change a float32 sum.
"""


@fused
def in_three(factor: Tensor, dim: int) -> Tensor:
    """Split a float32 matrix into three bfloat16 matrices, the largest first, concatenated along ``dim``."""
    return torch.cat(_pieces(factor), dim)


@fused
def _paired(factor: Tensor, dim: int, order: tuple[int, ...]) -> Tensor:
    pieces = _pieces(factor)
    return torch.cat([pieces[place] for place in order], dim)


def _pieces(factor: Tensor) -> list[Tensor]:
    pieces = []
    for _ in range(2):
        # Rounded by bit operations, since compilers drop casts to 16 bits and back, which leaves a difference of zero.
        piece = ((factor.view(torch.int32) + _HALF) & _UPPER).view(torch.float32)
        pieces.append(piece.to(torch.bfloat16))
        factor = factor - piece  # this difference is exact
    # By a cast, which also keeps NaN: bit operations turn CUDA's NaN, whose bits are all set, into zero.
    return [*pieces, factor.to(torch.bfloat16)]


@fused
def _scaled_sum(products: Tensor, dim: int, scale: float) -> Tensor:
    """Return ``scale`` times the sum of the three products that are concatenated along ``dim``."""
    return products.unflatten(dim, (3, -1)).sum(dim) * scale


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of bfloat16 matrices in float32, without rounding the sums to bfloat16.

    CPUs have no kernel for such a product, so on CPUs the matrices are cast to float32.
    """
    if widens_products(a.device):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float().mm(b.float())


def _add_wide(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if widens_products(out.device):
        return out.addmm_(a, b)
    return out.add_(a.float().mm(b.float()))


def _blocks(wide: Tensor) -> range:
    rows = max(1, _BLOCK // max(1, wide.shape[1]))
    return range(0, len(wide), rows)


def _to_thin(wide: Tensor, factor: Tensor, scale: float) -> Tensor:
    if wide.numel() <= _BLOCK:
        return wide.to(factor.dtype).mm(factor).mul_(scale)
    out = factor.new_empty((len(wide), factor.shape[1]))
    blocks = _blocks(wide)
    for start in blocks:
        rows = slice(start, start + blocks.step)
        out[rows].addmm_(wide[rows].to(factor.dtype), factor, beta=0, alpha=scale)
    return out


def _add_from_thin(wide: Tensor, thin: Tensor, factor: Tensor) -> None:
    blocks = _blocks(wide)
    for start in blocks:
        rows = slice(start, start + blocks.step)
        wide[rows].add_(thin[rows].mm(factor))


def _thin_gradient(thin: Tensor, wide: Tensor, transposed: bool) -> Tensor:
    if wide.numel() <= _BLOCK:
        total = thin.t().mm(wide.to(thin.dtype))
    else:
        total = thin.new_zeros((thin.shape[1], wide.shape[1]))
        blocks = _blocks(wide)
        for start in blocks:
            rows = slice(start, start + blocks.step)
            total.addmm_(thin[rows].t(), wide[rows].to(thin.dtype))
    # Transposed at the end: computing the product in transposed order takes up to eight times as long.
    return total.t().contiguous() if transposed else total


def _empty_thin(wide: Tensor, factor: Tensor, scale: float) -> Tensor:
    return factor.new_empty((len(wide), factor.shape[1]))


def _added(*_: Any) -> None:
    """Do nothing: the kernel of the operator ``add_from_thin`` for the meta device, whose tensors have no values."""


def _empty_gradient(thin: Tensor, wide: Tensor, transposed: bool) -> Tensor:
    shape = (thin.shape[1], wide.shape[1])
    return thin.new_empty(shape[::-1] if transposed else shape)


@cache
def _by_blocks() -> Any:
    """Return the custom operators that multiply by thin factors, and cast the wide activations in blocks of rows; the
    first call registers them with torch.
    """
    kernels: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "to_thin": (_to_thin, _empty_thin),
        "add_from_thin": (_add_from_thin, _added),
        "thin_gradient": (_thin_gradient, _empty_gradient),
    }
    _registered.append(torch.library.Library("hfscale", "FRAGMENT"))
    for name, (kernel, empty) in kernels.items():
        _registered[0].define(f"{name}{_SCHEMAS[name]}")
        _registered[0].impl(name, kernel, "CompositeExplicitAutograd")
        _registered[0].impl(name, empty, "Meta")
    return torch.ops.hfscale


_registered: list[
    torch.library.Library
] = []  # keeps the library alive: torch removes the operators of a library that is garbage-collected
