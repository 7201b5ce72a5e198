"""Products of the layers' linear projections in 8 bits, as a part.

The plan says which. Each projection stays the module that it is, of whatever class, with its weight in its own type;
its three products are made by :mod:`hfscale.ops.float8`, with the largest entries of tensors over all ranks that have
parts of them. What is around it computes as under ``"bf16"``: under autocast, or in what the data axes have cast.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..families.projections import is_transposed, weight_dims
from ..ops import WeightLater, project
from ..ops.float8 import Float8Groups, Float8Projection, weight_scales
from ..ops.products import multiply_by, products_of
from ..plan.float8 import Float8Plan
from ..runtime import Part, Runtime, local_tensor
from ..runtime.batches import Microbatch
from ..runtime.local_weights import LocalWeights
from ..runtime.names import computing, module_at
from ..schedules import ASYNCHRONOUS


class Float8(Part):
    """Nothing where no products are in 8 bits."""

    def __init__(self) -> None:
        self._projections: list[tuple[nn.Module, Float8Projection]] = []

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Inside of everything: edges of blocks, and what is recomputed, find such projections."""
        planned = runtime.plan.feature(Float8Plan)
        if planned is None:
            return
        for name in filter(runtime.is_local, planned.modules):
            for projection in computing(module_at(runtime.model, name)):
                made = Float8Projection(_groups(runtime, name, projection), planned.rowwise)
                multiply_by(projection, made)
                # Where nobody takes the gradient of its weight apart; no closure, so that a deep copy has its own.
                projection.forward = partial(compute, projection)
                self._projections.append((projection, made))

    @contextmanager
    def around_step(self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool) -> Iterator[None]:
        """Weights stay as they are within a step, so that their scales are found once: by tensors at its beginning, by
        one reduction for all of them. Schedules without a flush compute with several versions of the weights.
        """
        layout = runtime.mesh.layout
        if not self._projections or (layout.size("pp") > 1 and layout.pipeline_schedule in ASYNCHRONOUS):
            yield
            return
        runtime.release()  # or gathered weights would be taken for this rank's shards
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
    """Ranks with other parts of its tensors, as the plan cuts its weight and sequences are cut."""
    dims = {cut.dim for cut in runtime.plan.by_name[f"{name}.weight"].cuts if cut.axis == "tp"}
    tensor: list[dist.ProcessGroup] = runtime.mesh.groups("tp")
    outputs, inputs = (tensor if dim in dims else [] for dim in weight_dims(projection))
    return Float8Groups(runtime.mesh.groups("cp"), inputs, outputs)


def compute(projection: Any, x: Tensor) -> Tensor:
    """The output of a projection whose products are made as :func:`hfscale.ops.products.multiply_by` has said."""
    later = WeightLater(projection.weight, is_transposed(projection), None)
    later.products = products_of(projection)
    return project(x, later, projection.bias)
