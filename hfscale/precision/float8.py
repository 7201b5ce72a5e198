"""Products of the layers' linear projections in 8 bits, as a part.

The plan says which. Each projection stays the module that it is, of whatever class, with its weight in its own type;
its three products are made by :mod:`hfscale.ops.float8`, with the largest entries of tensors over all ranks that have
parts of them. What is around it computes as under ``"bf16"``: under autocast, or in what the data axes have cast.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..families.projections import is_transposed, weight_dims
from ..ops import WeightLater, project
from ..ops.float8 import Float8Groups, Float8Products
from ..ops.products import Products, multiply_by, products_of
from ..plan.float8 import Float8Plan
from ..runtime import Part, Runtime
from ..runtime.local_weights import LocalWeights
from ..runtime.names import computing, module_at


class Float8(Part):
    """Nothing where no products are in 8 bits."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Inside of everything: edges of blocks, and what is recomputed, find such projections."""
        planned = runtime.plan.feature(Float8Plan)
        if planned is None:
            return
        for name in filter(runtime.is_local, planned.modules):
            module = module_at(runtime.model, name)
            for projection in computing(module):
                make = _maker(_groups(runtime, name, projection), planned.rowwise)
                multiply_by(projection, make)
                # Where nobody takes the gradient of its weight apart; no closure, so that a deep copy has its own.
                projection.forward = partial(compute, projection)


def _groups(runtime: Runtime, name: str, projection: Any) -> Float8Groups:
    """Ranks with other parts of its tensors, as the plan cuts its weight and sequences are cut."""
    dims = {cut.dim for cut in runtime.plan.by_name[f"{name}.weight"].cuts if cut.axis == "tp"}
    tensor: list[dist.ProcessGroup] = runtime.mesh.groups("tp")
    outputs, inputs = (tensor if dim in dims else [] for dim in weight_dims(projection))
    return Float8Groups(runtime.mesh.groups("cp"), inputs, outputs)


def _maker(groups: Float8Groups, rowwise: bool) -> Callable[[], Products]:
    return lambda: Float8Products(groups, rowwise)


def compute(projection: Any, x: Tensor) -> Tensor:
    """The output of a projection whose products are made as :func:`hfscale.ops.products.multiply_by` has said."""
    later = WeightLater(projection.weight, is_transposed(projection), None)
    later.products = products_of(projection)
    return project(x, later, projection.bias)
