"""Compute matrix products in float8 (Micikevicius et al. 2022), with scales that are equal on all ranks of a tensor.

Each operand is scaled by its largest entry and rounded to a float of 8 bits, and the product is scaled back. The
arithmetic is that of torchao's ``Float8LinearConfig``, bit for bit, with one difference: the largest entry is that of
the full tensor, over all ranks that hold a shard of it, so that every entry is rounded as in one process::

    operand          its dims are sharded over          largest entry over
    x [n, in]        tokens, inputs (tp, row)           tokens, inputs
    weight [out,in]  outputs (tp, column), inputs       outputs, inputs
    grad [n, out]    tokens, outputs                    tokens, outputs

With rowwise scales, each row along the contracted dim has its own scale, and the largest entry is taken only over ranks
with other shards of the row: rows of ``x`` along ``in`` for the output, along ``n`` for the gradient of the weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..._compat.torch import scaled_mm, version_of
from ..._compat.torch_device import keep_for_stream
from ...distributed.ops.fused import fused
from ...distributed.ops.overlap import Products
from .gathered_weight import Float8Weight

FORWARD = torch.float8_e4m3fn
GRADIENT = torch.float8_e5m2
MULTIPLE = 16  # tensor cores need both dims of a weight to be multiples of this

_SCALES = "_hfscale_scales"  # attribute of an input tensor that holds its scales
_Groups = Sequence[dist.ProcessGroup]
# Maps the contracted dim to the rowwise scales along it, and ``None`` to the tensorwise scale
_ByDim = dict[int | None, Tensor]
_LEAST = 1e-12  # lower bound of the largest entry, so that a tensor of zeros stays zero


@dataclass(frozen=True)
class Float8Groups:
    """Hold the process groups over which each dim of a projection's tensors is sharded; empty for an unsharded dim."""

    tokens: _Groups = ()
    inputs: _Groups = ()
    outputs: _Groups = ()
    owners: _Groups = ()  # the data ranks that shard the weight

    def sharing(self, name: str, along: int | None) -> list[dist.ProcessGroup]:
        """Return the process groups whose ranks have the same scale of operand ``name`` (``"x"``, ``"weight"``,
        ``"grad"``): the rowwise scales ``along`` a dim, or the tensorwise scale if ``along`` is ``None``.
        """
        by_dim = {
            "x": (self.tokens, self.inputs),
            "grad": (self.tokens, self.outputs),
        }
        groups = by_dim.get(name, (self.outputs, self.inputs))
        return (
            [
                *groups[0],
                *groups[1],
            ]
            if along is None
            else list(groups[along])
        )


@dataclass(frozen=True)
class _Scaled:
    """Hold a matrix ``[n, m]`` as ``data / scale``: one scale ``[]``, one per row ``[n, 1]`` or per column ``[1,
    m]``.
    """

    data: Tensor
    scale: Tensor

    def t(self) -> "_Scaled":
        return _Scaled(
            self.data.t(),
            self.scale.t() if self.scale.ndim == 2 else self.scale,
        )

    def wide(self, dtype: torch.dtype) -> Tensor:
        return self.data.to(dtype) / self.scale


class Float8Projection:
    """Compute the products of one projection in 8 bits. Calling it returns a :class:`Float8Products` for one pass.

    Args:
        groups: the process groups over which the projection's tensors are sharded.
        rowwise: each row has a scale that is a power of two, and gradients are rounded to e4m3 like all operands.
            Otherwise each tensor has one scale, and gradients are rounded to e5m2 (fewer digits, wider range).
    """

    def __init__(self, groups: Float8Groups, rowwise: bool = False) -> None:
        self.groups = groups
        self.rowwise = rowwise
        # Scales of the weight that several passes use; ``None`` if the weight may have changed since the last pass.
        self.shared: _ByDim | None = None

    def __call__(self) -> "Float8Products":
        """Return a new :class:`Float8Products`, which computes the products of one forward and backward pass."""
        return Float8Products(self.groups, self.rowwise, self.shared)

    def __deepcopy__(self, memo: Any) -> "Float8Projection":
        """Return a new projection over the same ranks, without cached scales."""
        return Float8Projection(self.groups, self.rowwise)

    def encode(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Return a data rank's ``shard`` of the weight as bytes of 8-bit entries, since every backend can send bytes,
        and the full weight's scale; see :func:`hfscale._compat.torch_fsdp.gather_encoded`.
        """
        matrix = shard.to(computed_in(shard.dtype))
        everyone = (*self.groups.owners, *self.groups.sharing("weight", None))
        scale = None if self.shared is None else self.shared.get(None)
        scale = (
            _scale_for(_over_ranks(_largest(matrix, None), everyone), FORWARD)
            if scale is None
            else scale
        )
        return _rounded(matrix, scale, FORWARD).view(torch.uint8), scale

    def decode(
        self, gathered: Tensor, known: Tensor, dtype: torch.dtype, out: Tensor | None
    ) -> Tensor:
        """Return the gathered weight, made of gathered bytes and the scale ``known``; update ``out`` if it is given."""
        keep_for_stream(known)  # the scale was computed on the stream of the all-gather
        if out is None:
            return Float8Weight(gathered.view(FORWARD), known.clone(), dtype)
        assert isinstance(out, Float8Weight)
        out.scale.copy_(known)
        return out


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which a weight is cast before it is rounded to 8 bits: bfloat16, or float64 for float64."""
    return dtype if dtype == torch.float64 else torch.bfloat16


def share_weight_scales(
    weights: Sequence[tuple[Float8Projection, Tensor]], groups: _Groups
) -> None:
    """Compute the scales of all ``weights [out, in]``, which are sharded over ``groups``, with one all-reduce per
    group. Of rowwise scales, only those along sharded dims are computed.
    """
    parts = [
        (made, along, _largest(weight, along))
        for made, weight in weights
        for along in ((0, 1) if made.rowwise else (None,))
        if along is None or made.groups.sharing("weight", along)
    ]
    if not parts:
        return
    (first, weight), largest = weights[0], [own for _, _, own in parts]
    scales = first().find("weight", largest, groups, computed_in(weight.dtype))
    for (made, along, _), scale in zip(parts, scales, strict=True):
        assert made.shared is not None
        made.shared[along] = scale


class Float8Products(Products):
    """Compute the products of one forward and backward pass in 8 bits. ``groups`` and ``rowwise`` are those of
    :class:`Float8Projection`; ``shared`` holds scales of the weight that several passes use.
    """

    agrees = True

    def __init__(
        self, groups: Float8Groups, rowwise: bool = False, shared: _ByDim | None = None
    ) -> None:
        self.groups = groups
        self.rowwise = rowwise
        self.scales: dict[str, Tensor] = {}  # operand -> tensorwise scale in this pass
        # Scales that are also used elsewhere: of the weight by other passes, of the input by other projections.
        self._shared: dict[str, _ByDim] = {} if shared is None else {"weight": shared}
        self.dtype = torch.float32

    @staticmethod
    def agree(asked: Sequence[tuple["Float8Products", Tensor]]) -> None:
        """Compute the scales of the gradients of several outputs, sharded over the same ranks, with one all-reduce per
        group.
        """
        first = asked[0][0]
        along = 1 if asked[0][0].rowwise else None
        largest = [_largest(grad, along) for _, grad in asked]
        scales = first.find(
            "grad",
            largest,
            first.groups.sharing("grad", along),
            largest[0].dtype,
        )
        for (products, _), scale in zip(asked, scales, strict=True):
            products.scales["grad"] = scale

    def reads(self, x: Tensor, dtype: torch.dtype) -> None:
        """Let all projections that read ``x`` share one scale of ``x``, which is then computed once. ``dtype`` is the
        dtype to which ``x`` will be cast; see :class:`Products`.
        """
        scales = x.__dict__.setdefault(_SCALES, {})  # lives as long as the input
        self._shared["x"] = scales.setdefault(
            (version_of(x), dtype, *self.groups.sharing("x", None)), {}
        )

    def of_weight(self) -> Tensor | None:
        """Return the weight's tensorwise scale if a pass of this step has computed it, else ``None``."""
        return self._shared.get("weight", {}).get(None)

    def kept(self, weight: Tensor) -> Tensor:
        """Return the tensor to keep for backward: the parameter itself, or its gathered 8-bit entries; never a cast
        copy.
        """
        if isinstance(weight, Float8Weight):
            self.scales["weight"] = weight.scale
            return weight.entries
        return weight

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output ``[..., out]`` in the dtype of ``x``, to which autocast has already been applied."""
        self.dtype = x.dtype
        rows = self._scaled("x", x.reshape(-1, x.shape[-1]), 1)
        product = _product(
            rows,
            self._weight(weight, 1).t(),
            x.dtype,
            fast=True,
        )
        # Reshape only if needed: a view returned by a custom autograd function could not be modified in place later.
        if x.ndim != product.ndim:
            product = product.view(*x.shape[:-1], product.shape[-1])
        return product if bias is None else product + bias.to(product.dtype)

    def to_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input; see :class:`Products`."""
        rows = self._scaled("grad", grad, 1)
        return _product(rows, self._weight(weight, 0), grad.dtype)

    def to_weight(self, grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
        """Return the gradient of the weight, ``[out, in]``, or ``[in, out]`` if ``transposed``, for the input
        ``x [n, in]`` and the gradient of the output, ``grad [n, out]``.
        """
        outputs = self._scaled("grad", grad, 0, by_columns=True)
        inputs = self._scaled("x", x, 0, by_columns=True)
        product = _product(outputs.t(), inputs, grad.dtype)
        return product.t() if transposed else product

    def _weight(self, weight: Tensor, along: int) -> _Scaled:
        if weight.dtype == FORWARD:  # gathered in 8 bits
            return _Scaled(weight, self.scales["weight"])
        # Cast to the input's dtype first, like gathered weights, so that forward and backward (no autocast) round
        # alike.
        return self._scaled("weight", weight.to(self.dtype), along, by_columns=along == 0)

    def _scaled(
        self,
        name: str,
        matrix: Tensor,
        along: int,
        by_columns: bool = False,
    ) -> _Scaled:
        """Return ``matrix`` in 8 bits. ``along`` is the contracted dim; with rowwise scales, each row along this dim
        has its own scale.
        """
        scale = self._scale(name, matrix, along if self.rowwise else None)
        dtype = self._dtype_of(name)
        data = (
            _rounded(matrix.t(), scale.t(), dtype).t()
            if by_columns
            else _rounded(matrix, scale, dtype)
        )
        return _Scaled(data, scale)

    def _scale(self, name: str, matrix: Tensor, along: int | None) -> Tensor:
        """Return the scale of an operand. A tensorwise scale is computed once per pass and reused."""
        shared = self._shared.get(name, {})
        scale = self.scales.pop(name, shared.get(along))
        if scale is None:
            scale = self._scale_for(
                name, _over_ranks(_largest(matrix, along), self.groups.sharing(name, along))
            )
        shared[along] = scale
        if along is None:
            self.scales[name] = scale
        return scale

    def find(
        self, name: str, largest: Sequence[Tensor], groups: _Groups, dtype: torch.dtype
    ) -> list[Tensor]:
        """Return the scales of several operands that are sharded over ``groups``, given their ``largest`` entries on
        this rank. Largest entries are cast to ``dtype`` and reduced with one all-reduce per group.
        """
        every = torch.cat([each.flatten() for each in largest]).to(dtype)
        scales = self._scale_for(name, _over_ranks(every, groups)).split(
            [each.numel() for each in largest]
        )
        return [scale.view_as(own) for scale, own in zip(scales, largest, strict=True)]

    def _scale_for(self, name: str, largest: Tensor) -> Tensor:
        scale = _scale_for(largest, self._dtype_of(name))
        return torch.exp2(torch.floor(torch.log2(scale))) if self.rowwise else scale

    def _dtype_of(self, name: str) -> torch.dtype:
        return GRADIENT if name == "grad" and not self.rowwise else FORWARD


def compiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, products: "Float8Products"
) -> Tensor:
    """Return the output of a linear projection in fp8, in a form that torch.compile can trace. The output is bit for
    bit that of ``products`` without torch.compile.
    """
    return _CompiledLinear.apply(
        x, weight, bias, products.of_weight(), products.groups, products.rowwise
    )


class _CompiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        groups: Any,
        rowwise: bool,
    ) -> Tensor:
        made = Float8Products(groups, rowwise)
        if scale is not None:
            made.scales["weight"] = scale
        output = made.output(x, weight, bias)
        ctx.groups = groups
        ctx.rowwise = rowwise
        ctx.save_for_backward(
            x,
            weight,
            *(
                []
                if rowwise
                else [
                    made.scales["weight"],
                    made.scales["x"],
                ]
            ),
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *scales = ctx.saved_tensors
        made = Float8Products(ctx.groups, ctx.rowwise)
        made.dtype, made.scales = (
            x.dtype,
            dict(zip(("weight", "x"), scales, strict=False)),
        )
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        needed = ctx.needs_input_grad
        to_input = made.to_input(grad, weight).view(x.shape) if needed[0] else None
        to_weight = (
            made.to_weight(grad, x.reshape(-1, x.shape[-1]), False).to(weight.dtype)
            if needed[1]
            else None
        )
        return to_input, to_weight, grad.sum(0) if needed[2] else None, None, None, None


@fused
def _rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return (matrix.to(torch.float32) * scale).clamp(-most, most).to(dtype).contiguous()


def _largest(matrix: Tensor, along: int | None) -> Tensor:
    """Return the largest absolute value of a matrix, or the largest values along dim ``along``."""
    if along is None:
        return (
            torch.linalg.vector_norm(matrix, math.inf) if matrix.numel() else matrix.new_zeros(())
        )
    if matrix.shape[along]:
        return torch.linalg.vector_norm(matrix, math.inf, along, keepdim=True)
    return matrix.new_zeros([1 if dim == along else size for dim, size in enumerate(matrix.shape)])


def _over_ranks(largest: Tensor, groups: _Groups) -> Tensor:
    """Return the maximum of ``largest`` over all ranks of ``groups``, with one in-place all-reduce per group."""
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def _scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return (torch.finfo(dtype).max / largest.to(torch.float64).clamp(min=_LEAST)).to(torch.float32)


def _product(
    a: _Scaled,
    b: _Scaled,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """Return ``a [n, k]`` times ``b [k, m]`` in ``dtype``; ``fast`` lets sums be accumulated with fewer digits."""
    # Without tensor cores: the same products, but sums keep all digits.
    if not a.data.is_cuda:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return a.wide(wide).mm(b.wide(wide)).to(dtype)
    return on_tensor_cores(a.data, a.scale, b.data, b.scale, dtype, fast)


def on_tensor_cores(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """Return ``(a / scale_a) @ (b / scale_b)`` of float8 matrices, by torch's scaled matmul.

    The kernel needs ``a`` in row-major and ``b`` in column-major memory, and multiples of 16 for the contracted dim and
    the columns of ``b``, so both matrices are padded with zeros. Rowwise scales are applied to the product afterwards,
    unless ``fast`` allows less exact sums: the kernel with rowwise scales is slow without fast accumulation.
    """
    inverse_a = scale_a.reciprocal()
    inverse_b = scale_b.reciprocal()
    rowwise = scale_a.ndim == 2
    columns = b.shape[1]
    a = _padded(a, 1)
    b = _padded(b, 0, 1)
    given_a, given_b = (inverse_a.new_ones(()),) * 2 if rowwise else (inverse_a, inverse_b)
    if rowwise and fast:
        given_a = inverse_a
        given_b = F.pad(inverse_b, (0, b.shape[1] - columns), value=1.0)
    wide = (
        torch.bfloat16 if rowwise and fast else dtype if dtype != torch.float64 else torch.float32
    )
    product = scaled_mm(
        _by_rows(a), _by_rows(b.t()).t(), given_a, given_b, out_dtype=wide, use_fast_accum=fast
    )
    product = product[:, :columns]
    return (
        _times_both(product, inverse_a, inverse_b, dtype)
        if rowwise and not fast
        else product.to(dtype)
    )


@fused
def _times_both(found: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    return (found * rows * columns).to(dtype)


def _by_rows(matrix: Tensor) -> Tensor:
    """Return the matrix in row-major memory, with regular strides even if it has only one row or column."""
    return matrix.contiguous().as_strided(matrix.shape, (matrix.shape[1], 1))


def _padded(matrix: Tensor, *dims: int) -> Tensor:
    """Pad the matrix with zeros so that the size of each of ``dims`` is a multiple of 16."""
    missing = [-matrix.shape[dim] % MULTIPLE if dim in dims else 0 for dim in (0, 1)]
    if not any(missing):
        return matrix
    rows, columns = (size + more for size, more in zip(matrix.shape, missing, strict=True))
    padded = matrix.new_zeros((rows, columns))
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded
