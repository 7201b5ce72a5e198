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

from ..._compat.torch import as_plain_tensors, scaled_mm, tensor_without_memory
from ...distributed.ops.fused import fused
from ...distributed.ops.overlap import Products
from ...errors import ConfigError

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.view.default, _aten.as_strided.default)
_LIKE = (_aten.zeros_like.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.new_empty.default)


class Float8Weight(Tensor):
    """A tensor in place of a parameter ``[out, in]`` while it is gathered; autograd sees the type of its gradient."""

    entries: Tensor  # the weight times its scale, rounded to 8 bits
    scale: Tensor  # a scalar tensor that views of the weight share, so that it can be renewed with the entries

    def __new__(cls, entries: Tensor, scale: Tensor, dtype: torch.dtype) -> "Float8Weight":
        """Make a tensor that reports ``dtype`` as its own."""
        made: Float8Weight = tensor_without_memory(cls, tuple(entries.shape), dtype, entries.device)
        made.entries, made.scale = entries, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the inner tensors, in torch's protocol for tensor subclasses."""
        return ["entries", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(made_of: dict[str, Tensor], dtype: Any, *_: Any) -> "Float8Weight":
        """Rebuild the weight from its inner tensors."""
        return Float8Weight(made_of["entries"], made_of["scale"], dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run torch's own functions, down to :meth:`__torch_dispatch__`."""
        return as_plain_tensors(func, *args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return views, or plain tensors of its shape and type; raise :class:`ConfigError` if entries would be read."""
        weight = args[0]
        if func is _aten.t.default:
            return cls(weight.entries.t(), weight.scale, weight.dtype)
        if func in _SAME and (len(args) == 1 or tuple(args[1]) == tuple(weight.shape)):
            return cls(weight.entries, weight.scale, weight.dtype)
        if func in _LIKE:
            plain = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            return func(plain, *args[1:], **{"device": weight.device, **(kwargs or {})})
        raise ConfigError(
            f"{func} reads a weight that data ranks have gathered in 8 bits, for products of mixed_precision='fp8' and "
            "nothing else: use float8=hfscale.Float8Config(fp8_all_gather=False), or read weights between steps"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8Weight({tuple(self.shape)}, dtype={self.dtype})"


FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # tensor cores need both dims of a weight to be multiples of this

_LEAST = 1e-12  # lower bound of a largest entry: a tensor of zeros stays zero


@dataclass(frozen=True)
class Float8Groups:
    """Hold the groups of ranks with other shards of a projection's tensors, per dim; empty for an uncut dim."""

    tokens: Sequence[dist.ProcessGroup] = ()
    inputs: Sequence[dist.ProcessGroup] = ()
    outputs: Sequence[dist.ProcessGroup] = ()


@dataclass(frozen=True)
class _Scaled:
    """Hold a matrix ``[n, m]`` as ``data / scale``: one scale, one per row ``[n, 1]``, or one per column ``[1, m]``."""

    data: Tensor
    scale: Tensor

    def t(self) -> "_Scaled":
        return _Scaled(self.data.t(), self.scale.t() if self.scale.ndim == 2 else self.scale)

    def wide(self, dtype: torch.dtype) -> Tensor:
        return self.data.to(dtype) / self.scale


class Float8Projection:
    """Compute the products of a projection in 8 bits; calling it returns the products of one pass. ``groups`` are the
    ranks with the other shards of its tensors. ``rowwise``, each row has a scale, a power of two, and gradients have as
    many digits as the rest; else each tensor has one, and gradients have fewer digits over a wider range.
    """

    def __init__(self, groups: Float8Groups, rowwise: bool = False) -> None:
        self.groups, self.rowwise = groups, rowwise
        # scales of the weight kept between passes that find it unchanged, by the dim they are along (``None``: the
        # tensorwise one). ``None`` where the weight may have changed since the last pass
        self.shared: dict[int | None, Tensor] | None = None

    def __call__(self) -> "Float8Products":
        """Return the products of the pass that begins."""
        return Float8Products(self.groups, self.rowwise, self.shared)

    def __deepcopy__(self, memo: Any) -> "Float8Projection":
        """Return a projection over the same ranks, with a weight of its own."""
        return Float8Projection(self.groups, self.rowwise)

    def encode(self, shard: Tensor, owners: Sequence[dist.ProcessGroup]) -> tuple[Tensor, Tensor]:
        """Return a data rank's shard in 8 bits, and the full weight's scale, with the ranks of ``owners``."""
        matrix = shard.to(computed_in(shard.dtype))
        everyone = (*owners, *self.groups.inputs, *self.groups.outputs)
        scale = None if self.shared is None else self.shared.get(None)
        scale = _scale_for(_largest(matrix, None, everyone), FORWARD) if scale is None else scale
        return _rounded(matrix, scale, FORWARD), scale


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a weight is cast to before 8 bits: the compute dtype outside the products."""
    return dtype if dtype == torch.float64 else torch.bfloat16


def weight_scales(weights: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> list[Tensor]:
    """Return the scale of each full weight, given this rank's shards, with one all-reduce over each of ``groups``."""
    largest = torch.stack([_largest(weight, None, ()) for weight in weights])
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return list(_scale_for(largest.to(computed_in(weights[0].dtype)), FORWARD).unbind())


class Float8Products(Products):
    """Compute the products in 8 bits of one pass of a :class:`Float8Projection`, whose attributes the arguments are."""

    def __init__(
        self, groups: Float8Groups, rowwise: bool = False, shared: dict[int | None, Tensor] | None = None
    ) -> None:
        self.groups, self.rowwise, self._of_weight = groups, rowwise, shared
        self.scales: dict[str, Tensor] = {}
        self.dtype = torch.float32

    def of_weight(self) -> Tensor | None:
        """Return the weight's tensorwise scale, where a pass of this step has it."""
        return None if self._of_weight is None else self._of_weight.get(None)

    def kept(self, weight: Tensor) -> Tensor:
        """Return the parameter itself, or the 8 bits in which it was gathered: no copy in another type."""
        if isinstance(weight, Float8Weight):
            self.scales["weight"] = weight.scale
            return weight.entries
        return weight

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output in the type of ``x``, to which autocast has brought it."""
        self.dtype = x.dtype
        rows = self._scaled("x", x.reshape(-1, x.shape[-1]), 1, self.groups.tokens, self.groups.inputs)
        found = _product(rows, self._weight(weight, 1).t(), x.dtype, fast=True)
        found = found.view(*x.shape[:-1], found.shape[-1])
        return found if bias is None else found + bias.to(found.dtype)

    def to_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input; see :class:`Products`."""
        rows = self._scaled("grad", grad, 1, self.groups.tokens, self.groups.outputs)
        return _product(rows, self._weight(weight, 0), grad.dtype)

    def to_weight(self, grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
        """Return the gradient of the weight; see :class:`Products`."""
        outputs = self._scaled("grad", grad, 0, self.groups.tokens, self.groups.outputs, by_columns=True)
        inputs = self._scaled("x", x, 0, self.groups.tokens, self.groups.inputs, by_columns=True)
        found = _product(outputs.t(), inputs, grad.dtype)
        return found.t() if transposed else found

    def _weight(self, weight: Tensor, along: int) -> _Scaled:
        if weight.dtype == FORWARD:  # gathered in 8 bits
            return _Scaled(weight, self.scales["weight"])
        # Through the input's type, as data ranks gather it: the backward pass, which has no autocast, rounds alike.
        groups = self.groups.outputs, self.groups.inputs
        return self._scaled("weight", weight.to(self.dtype), along, *groups, by_columns=along == 0)

    def _scaled(
        self,
        name: str,
        matrix: Tensor,
        along: int,
        *groups_by_dim: Sequence[dist.ProcessGroup],
        by_columns: bool = False,
    ) -> _Scaled:
        """Return ``matrix`` in 8 bits, whose other shards ``groups_by_dim`` have; rowwise, ``along`` is contracted."""
        dtype = GRADIENT if name == "grad" and not self.rowwise else FORWARD
        shared = self._of_weight if name == "weight" else None
        of = along if self.rowwise else None
        if shared is not None and of in shared:
            scale = shared[of]
        elif self.rowwise:
            scale = _scale_for(_largest(matrix, along, groups_by_dim[along]), dtype)
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        else:
            if name not in self.scales:
                both = [group for groups in groups_by_dim for group in groups]
                self.scales[name] = _scale_for(_largest(matrix, None, both), dtype)
            scale = self.scales[name]
        if shared is not None:
            shared[of] = scale
        data = _rounded(matrix.t(), scale.t(), dtype).t() if by_columns else _rounded(matrix, scale, dtype)
        return _Scaled(data, scale)


def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, products: "Float8Products") -> Tensor:
    """Return the output of a linear projection in a form that torch.compile traces, in the same arithmetic."""
    return _CompiledLinear.apply(x, weight, bias, products.of_weight(), products.groups, products.rowwise)


class _CompiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, groups: Any, rowwise: bool
    ) -> Tensor:
        made = Float8Products(groups, rowwise)
        if scale is not None:
            made.scales["weight"] = scale
        found = made.output(x, weight, bias)
        ctx.groups, ctx.rowwise = groups, rowwise
        ctx.save_for_backward(x, weight, *([] if rowwise else [made.scales["weight"], made.scales["x"]]))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *scales = ctx.saved_tensors
        made = Float8Products(ctx.groups, ctx.rowwise)
        made.dtype, made.scales = x.dtype, dict(zip(("weight", "x"), scales, strict=False))
        grad, needed = grads[0].reshape(-1, grads[0].shape[-1]), ctx.needs_input_grad
        to_input = made.to_input(grad, weight).view(x.shape) if needed[0] else None
        to_weight = made.to_weight(grad, x.reshape(-1, x.shape[-1]), False).to(weight.dtype) if needed[1] else None
        return to_input, to_weight, grad.sum(0) if needed[2] else None, None, None, None


@fused
def _rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return (matrix.to(torch.float32) * scale).clamp(-most, most).to(dtype).contiguous()


def _largest(matrix: Tensor, along: int | None, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return a matrix's largest absolute value, or ``along`` a dim of it, over this rank and those of ``groups``."""
    if along is None:
        found = torch.linalg.vector_norm(matrix, math.inf) if matrix.numel() else matrix.new_zeros(())
    elif matrix.shape[along]:
        found = torch.linalg.vector_norm(matrix, math.inf, along, keepdim=True)
    else:
        found = matrix.new_zeros([1 if dim == along else size for dim, size in enumerate(matrix.shape)])
    for group in groups:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found


def _scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return (torch.finfo(dtype).max / largest.to(torch.float64).clamp(min=_LEAST)).to(torch.float32)


def _product(a: _Scaled, b: _Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return ``a [n, k]`` times ``b [k, m]`` in ``dtype``; ``fast`` lets sums be accumulated with fewer digits."""
    if not a.data.is_cuda:  # the same numbers; sums are not rounded to what tensor cores keep of them
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return a.wide(wide).mm(b.wide(wide)).to(dtype)
    return on_tensor_cores(a.data, a.scale, b.data, b.scale, dtype, fast)


def on_tensor_cores(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Return ``(a / scale_a) @ (b / scale_b)`` of float8 matrices, by torch's own kernel. It takes ``a`` by rows and
    ``b`` by columns, and multiples of 16 of the contracted dim and of ``b``'s other. Scales of rows are multiplied
    afterwards unless sums may be ``fast``, since the kernel for them is slow otherwise.
    """
    inverse_a, inverse_b = scale_a.reciprocal(), scale_b.reciprocal()
    rowwise, columns = scale_a.ndim == 2, b.shape[1]
    a, b = _padded(a, 1), _padded(b, 0, 1)
    given_a, given_b = (inverse_a.new_ones(()),) * 2 if rowwise else (inverse_a, inverse_b)
    if rowwise and fast:
        given_a, given_b = inverse_a, F.pad(inverse_b, (0, b.shape[1] - columns), value=1.0)
    wide = torch.bfloat16 if rowwise and fast else dtype if dtype != torch.float64 else torch.float32
    found = scaled_mm(_by_rows(a), _by_rows(b.t()).t(), given_a, given_b, out_dtype=wide, use_fast_accum=fast)
    found = found[:, :columns]
    return _times_both(found, inverse_a, inverse_b, dtype) if rowwise and not fast else found.to(dtype)


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
