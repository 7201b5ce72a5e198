"""Gather weights of products in 8 bits, with one scale, instead of in the type that is computed in.

::

    shard [n / ranks, m] --times the scale, rounded--> 1 byte an entry --all-gather--> Float8Weight [n, m]

The scale is that of the whole weight, over all ranks that have a part of it, so that every entry is rounded as the
product would have rounded it, and nothing is rounded twice. What trains is the shard, in its own type, as ever.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.torch_device import keep_for_stream
from ..._compat.torch_fsdp import gather_encoded
from ...distributed.mesh import Mesh
from ...distributed.ops.overlap import multiplied_by
from ...plan import Plan
from ...plan.products_plan import gathered_in_8_bits
from ...train.runtime import Part, Runtime
from ...train.runtime.local_weights import LocalWeights
from ...train.runtime.parameter_names import computing, module_at
from .scaled_matmul import FORWARD, Float8Projection
from .weight import Float8Weight


@dataclass(frozen=True)
class _InEightBits:
    """Encode shards in 8 bits; see :class:`hfscale._compat.torch_fsdp.Encoding`."""

    projection: Float8Projection
    owners: list[dist.ProcessGroup]

    def encode(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shard as bytes, which every backend sends, and its scale."""
        entries, scale = self.projection.encode(shard, self.owners)
        return entries.view(torch.uint8), scale

    def decode(self, gathered: Tensor, known: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return the gathered weight with the scale of the full weight."""
        keep_for_stream(known)  # made on the stream that gathers
        if out is None:
            return Float8Weight(gathered.view(FORWARD), known.clone(), dtype)
        assert isinstance(out, Float8Weight)
        out.scale.copy_(known)
        return out


class Float8Gather(Part):
    """All-gather weights in 8 bits, where the plan says so."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Encode the all-gathers of FSDP2. Must follow the data axes, which shard the weights."""
        gather_in_8_bits(runtime.model, runtime.plan, runtime.mesh)


def gather_in_8_bits(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Make FSDP2 gather in 8 bits the sharded weights that the plan marks."""
    encodings: dict[nn.Module, _InEightBits] = {}
    for name in sorted(gathered_in_8_bits(plan)):
        if plan.is_local(mesh.pp_rank, name):
            for projection in computing(module_at(model, name.removesuffix(".weight"))):
                made = multiplied_by(projection)
                assert isinstance(made, Float8Projection)
                encodings[projection] = _InEightBits(made, mesh.groups("dp_shard"))
    if encodings:
        gather_encoded(model, encodings)
