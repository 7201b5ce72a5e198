"""Cut a stock model in place: local parameters, then the edges, in the plan's words.

Data flow of one block (``t`` tensor ranks, ``h`` hidden size)::

    [b, s, h] --enter--> column projections --> [b, s, .../t] --> row projection --> partial [b, s, h] --leave--> whole

Inside the edges every module is the stock one with local sizes and plain tensors, so whatever works on such modules
(adapters, quantized layers, compilers, FSDP) works there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._compat.torch import own_parameters
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...models.partial_outputs import partial_output
from ...models.projections import follow_weight
from ...plan import BlockPlan, ParameterPlan, Plan
from ...plan.parameter import MODEL_AXES
from ...plan.recompute_plan import recomputed
from ...train.runtime import Runtime
from ...train.runtime.parameter_names import owner_of
from .block_edges import install_block_edges
from .deferred_weights import Overlap
from .edges import set_local_sizes
from .embedding import install_vocab_parallel_embedding
from .partial_gradients import PartialSums, install_partial_sums
from .replicated_heads import install_replica_sums
from .router_loss import is_counted
from .sequence_hooks import install_sequence_hooks
from .sequence_region import SequenceRegion


def install_edges(
    runtime: Runtime,
    sums: PartialSums,
    regions: Sequence[SequenceRegion],
    region_of: Callable[[str], SequenceRegion | None],
    overlaps: dict[str, Overlap],
) -> None:
    """Install the collectives of tensor and sequence parallelism in a model that holds this rank's tensor shards.

    Args:
        sums: will sum the gradients of parameters whose gradients are partial.
        regions: the layer stacks under sequence parallelism.
        region_of: returns the region of a module in the layers.
        overlaps: filled with the entries of blocks that overlap their collectives, by block name.
    """
    model, plan, mesh = runtime.model, runtime.plan, runtime.mesh
    for stream in regions:
        install_sequence_hooks(stream, model, runtime.is_local)
    install_partial_sums(model, plan, sums, runtime.is_local, first=mesh.tp_rank == 0)
    for block in (block for block in plan.blocks if runtime.is_local(block.name)):
        set_local_sizes(model.get_submodule(block.name), block)
        cut = region_of(block.name)
        overlap = _overlap(model, plan, block, sums.group, cut)
        if overlap is not None:
            overlaps[block.name] = overlap
        install_block_edges(model, block, mesh, cut, overlap)
    install_replica_sums(model, plan, mesh, runtime.is_local)
    if plan.blocks:
        model.register_forward_pre_hook(_refuse_partial_outputs, with_kwargs=True)
    if regions:
        model.register_forward_pre_hook(_refuse_cut_outputs, with_kwargs=True)
    if plan.embedding is not None and runtime.is_local(plan.embedding):
        planned = plan.by_name[f"{plan.embedding}.weight"]
        install_vocab_parallel_embedding(model.get_submodule(plan.embedding), planned, mesh, list(regions))


def _overlap(
    model: nn.Module, plan: Plan, block: BlockPlan, group: dist.ProcessGroup, stream: SequenceRegion | None
) -> Overlap | None:
    if not plan.layout.overlap or len(block.enter) > 1 or block.enter_inputs:
        return None  # several entries: no single one feeds all projections
    if any(recomputed(plan).is_alone(name) for name in block.column):
        return None  # they are recomputed without the block's entry, which their weight gradients would need
    # The gradient of a replicated weight is summed inside backward, so it cannot be computed later.
    columns = [name for name in block.column if plan.by_name[f"{name}.weight"].replicas == 1]
    regather = bool(plan.layout.sequence_regather)
    return Overlap([model.get_submodule(name) for name in columns], group, stream, regather)


def _refuse_partial_outputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = {**kwargs, "output_router_logits": False} if is_counted() else kwargs
    if asked := partial_output(model.config, given):
        raise ConfigError(f"{asked}: leave it out, or load the model with tp_size=1")


def _refuse_cut_outputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("output_hidden_states")
    if torch.is_grad_enabled() and (model.config.output_hidden_states if wanted is None else wanted):
        raise ConfigError(
            "output_hidden_states=True would return only this rank's tokens under sequence_parallel: ask for "
            "hidden states under torch.no_grad(), or use sequence_parallel=False"
        )


def cut_parameters(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Replace every parameter that is sharded over the tensor or expert axis by this rank's shard.

    Keeps ties and ``requires_grad``. The model may be on any device; on the meta device only shapes change.
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
