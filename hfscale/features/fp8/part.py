"""FP8 matrix multiplications of the layers' linear projections, as a part.

The plan names the projections. Each stays the module that it is, of any class, with its weight in its own dtype; its
three products (output, input gradient, weight gradient) are computed by :mod:`hfscale.features.fp8.scaled_matmul`, with
scales from the largest entries over all ranks that have shards of a tensor. Everything else computes as under
``"bf16"``: under autocast, or in the dtype that FSDP2 casts to.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...config.schedules import ASYNCHRONOUS
from ...distributed.ops import WeightLater, project
from ...distributed.ops.products import multiply_by, products_of
from ...models.projections import is_transposed, weight_dims
from ...plan.products_plan import ProductsPlan
from ...train.runtime import Part, Runtime, local_tensor
from ...train.runtime.batches import Microbatch
from ...train.runtime.local_weights import LocalWeights
from ...train.runtime.parameter_names import computing, module_at
from .scaled_matmul import Float8Groups, Float8Projection, weight_scales


class Float8(Part):
    """A part that computes the planned projections in fp8."""

    def __init__(self) -> None:
        self._projections: list[tuple[nn.Module, Float8Projection]] = []

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Replace the projections' forward, before block edges and recomputation are installed around it."""
        planned = runtime.plan.feature(ProductsPlan)
        if planned is None:
            return
        for name in filter(runtime.is_local, planned.modules):
            for projection in computing(module_at(runtime.model, name)):
                made = Float8Projection(_groups(runtime, name, projection), planned.rowwise)
                multiply_by(projection, made)
                # For calls without deferred weight gradients. No closure, so that a deep copy has its own.
                projection.forward = partial(compute, projection)
                self._projections.append((projection, made))

    @contextmanager
    def around_step(self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool) -> Iterator[None]:
        """Compute the weights' scales once per step, since weights do not change within it: tensorwise ones at its
        beginning, by one all-reduce for all. Not with schedules without a flush, which compute with several
        versions of the weights.
        """
        layout = runtime.mesh.layout
        if not self._projections or (layout.pp > 1 and layout.pipeline_schedule in ASYNCHRONOUS):
            yield
            return
        runtime.release()  # gathered weights would be taken for shards
        for _, made in self._projections:
            made.shared = {}
        if not self._projections[0][1].rowwise:
            held = [local_tensor(projection.weight.detach()) for projection, _ in self._projections]  # type: ignore[arg-type, operator]
            scales = weight_scales(held, runtime.mesh.groups("dp_shard", "tp"))
            for (_, made), scale in zip(self._projections, scales, strict=True):
                made.shared = {None: scale}
        try:
            yield
        finally:
            for _, made in self._projections:
                made.shared = None


def _groups(runtime: Runtime, name: str, projection: Any) -> Float8Groups:
    """Return the process groups of the ranks with other shards of a projection's input, output and tokens."""
    dims = {cut.dim for cut in runtime.plan.by_name[f"{name}.weight"].cuts if cut.axis == "tp"}
    tensor: list[dist.ProcessGroup] = runtime.mesh.groups("tp")
    outputs, inputs = (tensor if dim in dims else [] for dim in weight_dims(projection))
    return Float8Groups(runtime.mesh.groups("cp"), inputs, outputs)


def compute(projection: Any, x: Tensor) -> Tensor:
    """Return the output of a projection whose products :func:`hfscale.distributed.ops.products.multiply_by` has set."""
    later = WeightLater(projection.weight, is_transposed(projection), None)
    later.products = products_of(projection)
    return project(x, later, projection.bias)
