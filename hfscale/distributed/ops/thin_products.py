"""Products of activations in 16 bits with an adapter's thin factors in 32 bits, with sums in 32 bits.

PEFT keeps factors in float32 beside a base in bfloat16, and casts activations up for products without tensor cores. No
copy of activations in 32 bits is made here. On a GPU a float32 factor is split into three bfloat16 numbers, whose sum
has all its 24 bits, and products of pieces are summed in float32 by the tensor cores::

    x f = x f1 + x f2 + x f3                            one product with [f1 f2 f3]; x is in bfloat16 already
    t f = t1 (f1 + f2 + f3) + t2 (f1 + f2) + t3 f1      one product of width 6r; the rest is below float32's bits

On other devices rows are cast block by block, in operators of their own, so that a block stays in the caches. Tensors
of one type are multiplied as they are.

Shapes: ``wide [n, m]`` are activations or their gradients, ``thin [n, r]`` their products with a factor.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..._compat.torch_device import widens_products
from .fused import fused

_BLOCK = 1 << 20  # entries of ``wide`` that are cast at once
_TINY = 1 << 14  # entries below which calling an operator takes longer than its work
_SCHEMAS = {
    "to_thin": "(Tensor wide, Tensor factor, float scale) -> Tensor",
    "add_from_thin": "(Tensor(a!) wide, Tensor thin, Tensor factor) -> ()",
    "thin_gradient": "(Tensor thin, Tensor wide, bool transposed) -> Tensor",
}


def to_thin(wide: Tensor, factor: Tensor, scale: float) -> Tensor:
    """Return ``scale wide @ factor``, ``[n, r]`` in the type of ``factor [m, r]``."""
    if splits(wide, factor):
        return _scaled_sum(wide_product(wide, in_three(factor, 1)), 1, scale)
    if torch.compiler.is_compiling():
        return wide.to(factor.dtype).mm(factor) * scale
    if wide.dtype == factor.dtype:
        out = factor.new_empty((len(wide), factor.shape[1]))
        return out.addmm_(wide, factor, beta=0, alpha=scale)  # 0: the empty memory is not read
    if wide.numel() < _TINY:
        return _to_thin(wide, factor, scale)
    thin: Tensor = _by_blocks().to_thin(wide, factor, scale)
    return thin


def add_from_thin(wide: Tensor, thin: Tensor, factor: Tensor) -> Tensor:
    """Add ``thin @ factor`` to ``wide`` in place, rounded once; ``thin`` and ``factor [r, m]`` are of one type."""
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
    """Return a factor's gradient ``thin.T @ wide [r, m]``, or ``[m, r]`` if ``transposed``, in the type of ``thin``."""
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
    """Return whether float32 factors are split into pieces for ``wide``."""
    return splits_for(wide.dtype, factor)


def splits_for(dtype: torch.dtype, factor: Tensor) -> bool:
    """Return whether float32 factors are split for activations in ``dtype``, on the device of ``factor``."""
    types = dtype, factor.dtype
    return widens_products(factor.device) and types == (torch.bfloat16, torch.float32)


_HALF = 1 << 15
_UPPER = -1 << 16
"""The last bit of a float32 that is added, and those that are kept, to round it to bfloat16."""

_OF_THIN = (0, 0, 0, 1, 1, 2)
_OF_FACTOR = (0, 1, 2, 0, 1, 0)
"""The pieces of both operands in the six products that float32 can tell from zero."""


@fused
def in_three(factor: Tensor, dim: int) -> Tensor:
    """Return three bfloat16 pieces of a float32 matrix, the largest first, side by side along ``dim``."""
    return torch.cat(_pieces(factor), dim)


@fused
def _paired(factor: Tensor, dim: int, order: tuple[int, ...]) -> Tensor:
    pieces = _pieces(factor)
    return torch.cat([pieces[place] for place in order], dim)


def _pieces(factor: Tensor) -> list[Tensor]:
    pieces = []
    for _ in range(3):
        # Rounded by its bits: a compiler leaves out casts to 16 bits and back, after which nothing would be left.
        piece = ((factor.view(torch.int32) + _HALF) & _UPPER).view(torch.float32)
        pieces.append(piece.to(torch.bfloat16))
        factor = factor - piece  # exact
    return pieces


@fused
def _scaled_sum(products: Tensor, dim: int, scale: float) -> Tensor:
    """Add the three products that stand side by side along ``dim``."""
    return products.unflatten(dim, (3, -1)).sum(dim) * scale


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of bfloat16 matrices in float32, as it is summed; CPUs have no such kernel."""
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
    if wide.numel() <= _BLOCK:
        wide.add_(thin.mm(factor))
        return
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
    # The other order of the product takes up to eight times as long.
    return total.t().contiguous() if transposed else total


def _empty_thin(wide: Tensor, factor: Tensor, scale: float) -> Tensor:
    return factor.new_empty((len(wide), factor.shape[1]))


def _added(*_: Any) -> None:
    """Add nothing: tensors on the meta device have no values."""


def _empty_gradient(thin: Tensor, wide: Tensor, transposed: bool) -> Tensor:
    shape = (thin.shape[1], wide.shape[1])
    return thin.new_empty(shape[::-1] if transposed else shape)


@cache
def _by_blocks() -> Any:
    """Return the operators that cast blocks of rows; they are registered with torch when they are first needed."""
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
] = []  # torch forgets the operators of a library that nobody holds
