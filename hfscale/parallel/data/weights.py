"""Load this rank's weights into a model on the meta device."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...plan import Plan
from ...plan.feature_plans import offloaded
from ...train.runtime import Part, Runtime, like_sharded
from ...train.runtime.parameter_names import parameter_at, put_parameter
from ...train.runtime.shards import LocalWeights


class UnshardedWeights(Part):
    """Load weights into a model that is not sharded over a data axis."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Load this rank's weights in place of the tensors on the meta device. Call this last: after all changes to the
        local sizes of parameters.
        """
        if weights is not None:
            install_local_weights(runtime.model, weights.tensors, runtime.plan, runtime.mesh)


def install_local_weights(
    model: nn.Module, shares: dict[str, Tensor], plan: Plan, mesh: Mesh
) -> None:
    """Load ``shares`` (name -> this rank's shard) into a model on the meta device, wrapped by FSDP2 or not."""
    made: dict[str, nn.Parameter] = {}
    for planned in plan.parameters:
        if not plan.is_local(mesh.pp_rank, planned.name):
            continue
        owner = planned.first_name
        if owner not in made:
            empty = parameter_at(model, planned.name)
            if empty is None:
                raise ConfigError(
                    f"the parameter {planned.name} was removed from the model before its weights were loaded: change "
                    "the model only after it is loaded"
                )
            placed = like_sharded(shares[owner], empty)
            if offloaded(plan).parameters and isinstance(placed, DTensor):
                placed = placed.to("cpu")
            made[owner] = nn.Parameter(placed, requires_grad=empty.requires_grad)
        put_parameter(model, planned.name, made[owner])
