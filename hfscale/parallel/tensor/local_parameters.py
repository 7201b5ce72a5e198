"""Cut a stock model's parameters in place to this rank's tensor and expert shards."""

from typing import Any

from torch import nn

from ..._compat.torch import own_parameters
from ...distributed.mesh import Mesh
from ...models.module_kinds import follow_weight
from ...plan import ParameterPlan, Plan
from ...plan.parameter import MODEL_AXES
from ...train.runtime.parameter_names import owner_of


def cut_parameters(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Replace every parameter that is sharded over the tensor or expert axis by this rank's shard; ties and
    ``requires_grad`` stay. The model may be on any device; on the meta device only shapes change.
    """
    replaced: dict[int, nn.Parameter] = {}
    for planned in plan.parameters:
        if not planned.model_cuts or not plan.is_local(mesh.pp_rank, planned.name):
            continue
        module, attribute = owner_of(model, planned.name)
        whole = getattr(module, attribute)
        if id(whole) not in replaced:
            replaced[id(whole)] = local_parameter(whole, planned, mesh)
        own_parameters(module)[attribute] = replaced[id(whole)]
        if attribute == "weight":
            follow_weight(module)


def local_parameter(whole: Any, planned: ParameterPlan, mesh: Mesh) -> nn.Parameter:
    """Return this rank's tensor or expert shard of a full parameter, as a copy."""
    share = planned.take(whole.detach(), mesh.ranks, axes=MODEL_AXES)
    share = share.clone() if share.device.type != "meta" else share.new_empty(share.shape)
    return nn.Parameter(share, requires_grad=whole.requires_grad)
