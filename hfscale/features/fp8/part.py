"""Compute the matrix products of the layers' linear projections in fp8.

The plan names the projections. Each projection stays an unchanged module of any class, with its weight in its own
dtype. Its three products (output, input gradient, weight gradient) are computed by
:mod:`hfscale.features.fp8.scaled_matmul`, with scales from the largest entry over all ranks that have shards of a
tensor. All other modules compute as under ``"bf16"``: under autocast, or in the dtype to which FSDP2 casts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.torch_fsdp import gather_encoded
from ...distributed.ops import overlap
from ...distributed.ops.shared_casts import autocasted
from ...models.module_kinds import is_transposed, weight_dims
from ...plan.feature_plans import ProductsPlan, gathered_in_8_bits
from ...train.runtime import Part, Runtime, local_tensor
from ...train.runtime.batches import Microbatch
from ...train.runtime.parameter_names import computing, module_at
from ...train.runtime.shards import LocalWeights
from .gathered_weight import Float8Weight
from .scaled_matmul import (
    Float8Groups,
    Float8Projection,
    compiled_linear,
    share_weight_scales,
)


class Float8(Part):
    """Compute the planned projections in fp8."""

    def __init__(self) -> None:
        self._projections: list[tuple[nn.Module, Float8Projection]] = []

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Replace the forward of the projections that the plan names, before tensor parallelism and recomputation wrap
        modules.
        """
        planned = runtime.plan.feature(ProductsPlan)
        assert planned is not None
        for name in filter(runtime.is_local, planned.modules):
            for projection in computing(module_at(runtime.model, name)):
                made = Float8Projection(_groups(runtime, name, projection), planned.rowwise)
                overlap.multiply_by(projection, made)
                # Used by calls without deferred weight gradients. It is a method and not a closure, so that a deep copy
                # of the module calls the copy's method.
                projection.forward = MethodType(compute, projection)
                self._projections.append((projection, made))

    @contextmanager
    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> Iterator[None]:
        """Compute the scales of weights once per step, since weights do not change within a step.

        At the beginning of the step, one all-reduce per process group computes the scales of all weights. Rowwise
        scales are exceptions if data ranks shard the weights, or in evaluation: they are computed when a pass first
        needs them. Schedules without a flush compute scales in every pass, since their passes use several versions of
        the weights.
        """
        if not self._projections or not runtime.mesh.layout.flushes:
            yield
            return
        runtime.data.release()  # scales are computed from shards, not from gathered weights
        weights = []
        for projection, made in self._projections:
            weight = local_tensor(projection.weight.detach())  # type: ignore[arg-type, operator]
            made.shared = {}
            weights.append((made, weight.t() if is_transposed(projection) else weight))
        if not weights[0][0].rowwise or (train and not runtime.mesh.groups("dp_shard")):
            share_weight_scales(weights, runtime.mesh.groups("dp_shard", "tp"))
        try:
            yield
        finally:
            for _, made in self._projections:
                made.shared = None


def _groups(runtime: Runtime, name: str, projection: Any) -> Float8Groups:
    """Return the process groups over which the tokens, inputs and outputs of a projection are sharded."""
    dims = {cut.dim for cut in runtime.plan.by_name[f"{name}.weight"].cuts if cut.axis == "tp"}
    context = runtime.mesh.context
    tokens = [] if context is None else [context]
    tensor: list[dist.ProcessGroup] = runtime.mesh.groups("tp")
    outputs, inputs = (tensor if dim in dims else [] for dim in weight_dims(projection))
    return Float8Groups(tokens, inputs, outputs, runtime.mesh.groups("dp_shard"))


def compute(projection: Any, x: Tensor) -> Tensor:
    """Return the output of ``projection`` for ``x`` in fp8, computed by the :class:`Float8Projection` that
    :meth:`Float8.install` has attached to the module.
    """
    if not torch.compiler.is_compiling():
        return _with_deferred_weight(projection, x)
    if is_transposed(projection) or isinstance(projection.weight, Float8Weight):
        return _uncompiled(projection, x)
    products: Any = overlap.multiplied_by(projection)()
    return compiled_linear(autocasted(x), projection.weight, projection.bias, products)


def _with_deferred_weight(projection: Any, x: Tensor) -> Tensor:
    products = overlap.multiplied_by(projection)()
    later = overlap.DeferredWeightGrad(projection.weight, is_transposed(projection), products)
    return overlap.column_parallel_linear(x, later, projection.bias)


_uncompiled = torch.compiler.disable(_with_deferred_weight)


class Float8Gather(Part):
    """All-gather in 8 bits, over data ranks, the weights that the plan chooses for this."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Make FSDP2 all-gather the weights that the plan names in 8 bits; installed after the data axes have sharded
        the weights.
        """
        encodings: dict[nn.Module, Float8Projection] = {}
        for name in filter(runtime.is_local, sorted(gathered_in_8_bits(runtime.plan))):
            for projection in computing(module_at(runtime.model, name.removesuffix(".weight"))):
                made = overlap.multiplied_by(projection)
                assert isinstance(made, Float8Projection)
                encodings[projection] = made
        if encodings:
            gather_encoded(runtime.model, encodings)
