"""Install the parts that make a model with local sizes compute with the other ranks, and take them out again."""

from typing import Any

import torch
from torch import nn

from ..checkpoint import save_pretrained
from ..config.options import Options
from ..distributed.mesh import Mesh
from ..features.adapters import Adapters
from ..features.fp8.part import Float8, Float8Gather
from ..features.memory.kept_activations import KeptActivations
from ..features.memory.recomputation import Recomputation
from ..features.precision.liger_kernels import LigerKernels
from ..features.precision.loss_scale import LossScaling
from ..features.precision.part import Autocast, SharedCasts
from ..features.quantization.part import Quantization
from ..parallel.context import ContextParallel
from ..parallel.data import DataParallel
from ..parallel.experts import ExpertParallel, ExpertRouting
from ..parallel.pipeline.part import PipelineStages
from ..parallel.tensor import RandomStreams, TensorParallel, VocabularyLoss
from ..plan import Plan
from ..train.guards.packed_rows import PackedRows
from ..train.guards.part import SharedBatch, StockCode
from ..train.runtime import Part, Runtime, local_tensor
from ..train.runtime.local_weights import LocalWeights
from ..train.runtime.parameter_names import put_parameter
from ..train.runtime.snapshot import watch


def parts_of(adapters: Adapters | None) -> tuple[Part, ...]:
    """Return all parts, in the order of installation; each reads from the plan whether it is needed.

    Parts that change modules come first, from the inside out; then those that hook the model; then those that wrap it
    and hold its weights; then those that run it; guards come last.
    """
    return (
        LossScaling(),
        LigerKernels(),
        SharedCasts(),
        Float8(),
        ExpertParallel(),
        TensorParallel(),
        *([adapters] if adapters is not None else []),
        VocabularyLoss(),
        ContextParallel(),
        Recomputation(),
        KeptActivations(),
        RandomStreams(),
        PackedRows(),
        SharedBatch(),
        ExpertRouting(),
        DataParallel(),
        Float8Gather(),
        Quantization(),
        Autocast(),
        PipelineStages(),
        StockCode(save_pretrained),
    )


def assemble(
    model: Any,
    plan: Plan,
    mesh: Mesh,
    options: Options,
    weights: LocalWeights | None,
    adapters: Adapters | None = None,
) -> Runtime:
    """Install every part into the model.

    Args:
        model: with this rank's sizes.
        weights: this rank's shards, for a model on the meta device; ``None`` if they are in place.
        adapters: PEFT's adapters around its modules, if any.
    """
    look_again = watch(model)
    runtime = Runtime(model, plan, mesh, options, parts=())
    runtime.parts = tuple(part for part in parts_of(adapters) if part.is_needed(runtime))
    for part in runtime.parts:
        part.install(runtime, weights)
    runtime.attach()
    runtime.restore = look_again()
    return runtime


def take_apart(runtime: Runtime) -> LocalWeights:
    """Undo :func:`assemble`: leave the model with its local sizes on the meta device.

    Returns:
        this rank's final shards, in the model's memory.
    """
    shares = LocalWeights(
        {planned.name: local_tensor(parameter).detach() for planned, parameter in runtime.parameters()}
    )
    trains = {planned.name: parameter.requires_grad for planned, parameter in runtime.parameters()}
    assert runtime.restore is not None
    runtime.restore()
    for part in runtime.parts:
        part.take_out(runtime, shares)
    quantized = runtime.plan.quantized.weights if runtime.plan.quantized is not None else ()
    made: dict[str, nn.Parameter] = {}
    for planned in runtime.plan.parameters:
        if not runtime.plan.is_local(runtime.mesh.pp_rank, planned.name) or planned.name in quantized:
            continue
        owner = planned.tied_to or planned.name
        if owner not in made:
            shape = planned.model_shape(runtime.mesh.ranks)
            empty = torch.empty(shape, dtype=shares.tensors[owner].dtype, device="meta")
            made[owner] = nn.Parameter(empty, requires_grad=trains[owner])
        put_parameter(runtime.model, planned.name, made[owner])
    return shares
