"""Matrix products in float8 (Micikevicius et al. 2022), with tensorwise scales that several ranks share.

Each operand is divided by its largest entry and rounded to a float of 8 bits; the product is multiplied back. The
arithmetic is torchao's (``Float8LinearConfig``), bit for bit, but for one thing: the largest entry is that of the full
tensor, over all ranks that hold a shard of it, so that every entry is rounded as one process rounds it::

    operand          its dims are cut over              largest entry over
    x [n, in]        tokens (cp), inputs (tp, row)      tokens, inputs
    weight [out,in]  outputs (tp, column), inputs       outputs, inputs
    grad [n, out]    tokens, outputs                    tokens, outputs

Rowwise, each row along the contracted dim has a scale of its own, and only ranks with other shards of that row are
asked: ``x`` along ``in`` for the output, along ``n`` for the gradient of the weight.
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
from ...distributed.ops.fused import fused
from ...distributed.ops.overlap import Products
from .gathered_weight import Float8Weight

FORWARD = torch.float8_e4m3fn
GRADIENT = torch.float8_e5m2
MULTIPLE = 16  # tensor cores need both dims of a weight to be multiples of this

_SCALES = "_hfscale_scales"  # attribute of an input with its scales
_Groups = Sequence[dist.ProcessGroup]
_ByDim = dict[int | None, Tensor]  # scales by the dim they are along; ``None``: a tensor's only one
_LEAST = 1e-12  # lower bound of a largest entry: a tensor of zeros stays zero


@dataclass(frozen=True)
class Float8Groups:
    """Hold the groups of ranks with other shards of a projection's tensors, per dim; empty for an uncut dim."""

    tokens: _Groups = ()
    inputs: _Groups = ()
    outputs: _Groups = ()

    def sharing(self, name: str, along: int | None) -> list[dist.ProcessGroup]:
        """Return the ranks that share the scales ``along`` a dim of an operand, or its only scale."""
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
    """Hold a matrix ``[n, m]`` as ``data / scale``: one scale, one per row ``[n, 1]``, or one per column ``[1, m]``."""

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
    """Compute the products of a projection in 8 bits; calling it returns the products of one pass. ``groups`` are the
    ranks with the other shards of its tensors. ``rowwise``, each row has a scale, a power of two, and gradients have as
    many digits as the rest; else each tensor has one, and gradients have fewer digits over a wider range.
    """

    def __init__(self, groups: Float8Groups, rowwise: bool = False) -> None:
        self.groups = groups
        self.rowwise = rowwise
        # scales of the weight that passes share; ``None`` where it may have changed since the last pass
        self.shared: _ByDim | None = None

    def __call__(self) -> "Float8Products":
        """Return the products of the pass that begins."""
        return Float8Products(self.groups, self.rowwise, self.shared)

    def __deepcopy__(self, memo: Any) -> "Float8Projection":
        """Return a projection over the same ranks, with a weight of its own."""
        return Float8Projection(self.groups, self.rowwise)

    def encode(self, shard: Tensor, owners: _Groups) -> tuple[Tensor, Tensor]:
        """Return a data rank's shard in 8 bits, and the full weight's scale, with the ranks of ``owners``."""
        matrix = shard.to(computed_in(shard.dtype))
        everyone = (*owners, *self.groups.sharing("weight", None))
        scale = None if self.shared is None else self.shared.get(None)
        scale = (
            _scale_for(_over_ranks(_largest(matrix, None), everyone), FORWARD)
            if scale is None
            else scale
        )
        return _rounded(matrix, scale, FORWARD), scale


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a weight is cast to before 8 bits: the compute dtype outside the products."""
    return dtype if dtype == torch.float64 else torch.bfloat16


def share_weight_scales(
    weights: Sequence[tuple[Float8Projection, Tensor]], groups: _Groups
) -> None:
    """Find all scales of weights ``[out, in]``, of which ``groups`` have parts, at once; rowwise, along cut dims."""
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
    """Compute the products in 8 bits of one pass of a :class:`Float8Projection`, whose attributes the arguments are."""

    agrees = True

    def __init__(
        self, groups: Float8Groups, rowwise: bool = False, shared: _ByDim | None = None
    ) -> None:
        self.groups = groups
        self.rowwise = rowwise
        self.scales: dict[str, Tensor] = {}  # of this pass
        # scales that others need too: of the weight in other passes, and of the input
        self._shared: dict[str, _ByDim] = {} if shared is None else {"weight": shared}
        self.dtype = torch.float32

    @staticmethod
    def agree(asked: Sequence[tuple["Float8Products", Tensor]]) -> None:
        """Find the scales of the gradients of several outputs, of which the same ranks have shards, by one question."""
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
        """Share the scale of ``x`` with the other projections that read it; see :class:`Products`."""
        scales = x.__dict__.setdefault(_SCALES, {})  # lives as long as the input
        self._shared["x"] = scales.setdefault(
            (version_of(x), dtype, *self.groups.sharing("x", None)), {}
        )

    def of_weight(self) -> Tensor | None:
        """Return the weight's tensorwise scale, where a pass of this step has it."""
        return self._shared.get("weight", {}).get(None)

    def kept(self, weight: Tensor) -> Tensor:
        """Return the parameter itself, or the 8 bits in which it was gathered: no copy in another type."""
        if isinstance(weight, Float8Weight):
            self.scales["weight"] = weight.scale
            return weight.entries
        return weight

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output in the type of ``x``, to which autocast has brought it."""
        self.dtype = x.dtype
        rows = self._scaled("x", x.reshape(-1, x.shape[-1]), 1)
        product = _product(
            rows,
            self._weight(weight, 1).t(),
            x.dtype,
            fast=True,
        )
        if (
            x.ndim != product.ndim
        ):  # a view could not be written into behind a backward pass of its own
            product = product.view(*x.shape[:-1], product.shape[-1])
        return product if bias is None else product + bias.to(product.dtype)

    def to_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input; see :class:`Products`."""
        rows = self._scaled("grad", grad, 1)
        return _product(rows, self._weight(weight, 0), grad.dtype)

    def to_weight(self, grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
        """Return the gradient of the weight; see :class:`Products`."""
        outputs = self._scaled("grad", grad, 0, by_columns=True)
        inputs = self._scaled("x", x, 0, by_columns=True)
        product = _product(outputs.t(), inputs, grad.dtype)
        return product.t() if transposed else product

    def _weight(self, weight: Tensor, along: int) -> _Scaled:
        if weight.dtype == FORWARD:  # gathered in 8 bits
            return _Scaled(weight, self.scales["weight"])
        # Through the input's type, as data ranks gather it: the backward pass, which has no autocast, rounds alike.
        return self._scaled("weight", weight.to(self.dtype), along, by_columns=along == 0)

    def _scaled(
        self,
        name: str,
        matrix: Tensor,
        along: int,
        by_columns: bool = False,
    ) -> _Scaled:
        """Return ``matrix`` in 8 bits; rowwise, ``along`` is contracted."""
        scale = self._scale(name, matrix, along if self.rowwise else None)
        dtype = self._dtype_of(name)
        data = (
            _rounded(matrix.t(), scale.t(), dtype).t()
            if by_columns
            else _rounded(matrix, scale, dtype)
        )
        return _Scaled(data, scale)

    def _scale(self, name: str, matrix: Tensor, along: int | None) -> Tensor:
        """Return the scale of an operand; tensorwise, it is that of the whole pass."""
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
        """Return the scales for the largest entries, as of ``dtype``, of several operands that ``groups`` share."""
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
    """Return the output of a linear projection in a form that torch.compile traces, in the same arithmetic."""
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
    """Return a matrix's largest absolute value, or ``along`` a dim of it."""
    if along is None:
        return (
            torch.linalg.vector_norm(matrix, math.inf) if matrix.numel() else matrix.new_zeros(())
        )
    if matrix.shape[along]:
        return torch.linalg.vector_norm(matrix, math.inf, along, keepdim=True)
    return matrix.new_zeros([1 if dim == along else size for dim, size in enumerate(matrix.shape)])


def _over_ranks(largest: Tensor, groups: _Groups) -> Tensor:
    """Return the largest entries, replaced by those of all ranks of ``groups``, which is one all-reduce over each."""
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
    # The same numbers; sums are not rounded to what tensor cores keep of them.
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
    """Return ``(a / scale_a) @ (b / scale_b)`` of float8 matrices, by torch's own kernel. It takes ``a`` by rows and
    ``b`` by columns, and multiples of 16 of the contracted dim and of ``b``'s other. Scales of rows are multiplied
    afterwards unless sums may be ``fast``, since the kernel for them is slow otherwise.
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
    """Return the matrix in row-major memory, with valid strides if it has one row or column."""
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
