"""List the features and axes of a layout, with their plan functions and parts; assemble and take apart a model.

No other file of this room names one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._compat.torch import allow_recompiles, undo_compile
from .._compat.torch_compiler import repeating_backend
from ..checkpoint import save_pretrained
from ..config.options import Options
from ..distributed.mesh import Mesh
from ..distributed.ops.fused import is_fused
from ..extensions import all_provided
from ..features.adapters import Adapters, FusedAdapters
from ..features.fp8.part import Float8, Float8Gather
from ..features.fp8.plan import plan_float8
from ..features.memory.kept_activations import KeptActivations
from ..features.memory.plan import plan_memory
from ..features.memory.recomputation import Recomputation
from ..features.precision.liger_kernels import LigerKernels
from ..features.precision.part import Autocast, LossScaling, ParameterCasts
from ..features.precision.plan import plan_precision
from ..features.prediction.part import MultiTokenPrediction
from ..features.prediction.plan import plan_prediction
from ..features.quantization.part import Quantization
from ..features.quantization.repeated_linears import RepeatedLinears
from ..features.towers.plan import plan_towers
from ..parallel.context import ContextParallel
from ..parallel.context.plan import plan_context
from ..parallel.data import DataParallel
from ..parallel.data.plan import plan_data
from ..parallel.experts import ExpertParallel, ExpertRouting, RouteReplay
from ..parallel.experts.plan import plan_experts
from ..parallel.pipeline.part import PipelineStages
from ..parallel.pipeline.plan import plan_pipeline
from ..parallel.tensor import RandomStreams, TensorParallel, VocabularyLoss
from ..parallel.tensor.plan import plan_own_loss, plan_tensor, plan_vocabulary
from ..parallel.tensor.sequence.plan import plan_sequence
from ..plan import Plan
from ..plan.drafting.draft import Draft
from ..plan.feature_plans import recomputed
from ..train.guards.part import SharedBatch, StockCode
from ..train.packed_rows.guard import PackedRows
from ..train.runtime import Part, Runtime, local_tensor
from ..train.runtime.parameter_names import put_parameter
from ..train.runtime.shards import LocalWeights
from ..train.runtime.snapshot import watch
from ..train.step_times import StepTimes

PLAN_PARTS: tuple[Callable[[Draft], None], ...] = (
    plan_experts,
    plan_tensor,
    plan_vocabulary,
    plan_own_loss,
    plan_prediction,
    plan_towers,
    plan_sequence,
    plan_context,
    plan_pipeline,
    plan_data,
    plan_memory,
    plan_precision,
    plan_float8,
)
"""Plan one feature each, in order: each finds in the draft what those before it have decided.

It adds cuts, partial gradients, modules and stages, and every problem that it finds, with the values that would do,
since all problems are reported at once. Where the layout does not ask for the feature it adds nothing.
"""


def plan_parts() -> tuple[Callable[[Draft], None], ...]:
    """Return the planning functions of this package, then those of extensions."""
    return (*PLAN_PARTS, *all_provided("plan_parts"))


def parts_of(adapters: Adapters | None) -> tuple[Part, ...]:
    """Return all parts, each of which reads from the plan whether it is needed, in the order of installation: of those
    that change modules, from the inside out, hook the model, wrap it and hold its weights, run it, and guard it.
    """
    return (
        LossScaling(),
        RepeatedLinears(),
        LigerKernels(),
        ParameterCasts(),
        Float8(),
        ExpertParallel(),
        TensorParallel(),
        *([adapters] if adapters is not None else []),
        FusedAdapters(),
        VocabularyLoss(),
        ContextParallel(),
        PackedRows(),  # inside of what is recomputed
        Recomputation(),
        KeptActivations(),
        RandomStreams(),
        SharedBatch(),
        ExpertRouting(),
        RouteReplay(),
        MultiTokenPrediction(),
        DataParallel(),
        Float8Gather(),
        Quantization(),
        Autocast(),
        PipelineStages(),
        *(made() for made in all_provided("parts")),
        StepTimes(),
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
    """Install every part into a model with this rank's sizes; ``weights`` are its shards, unless in place."""
    look_again = watch(model)
    runtime = Runtime(model, plan, mesh, options, parts=())
    runtime.parts = tuple(part for part in parts_of(adapters) if part.is_needed(runtime))
    for part in runtime.parts:
        part.install(runtime, weights)
    runtime.attach()
    compile_layers(runtime, options.compile)
    runtime.restore = look_again()
    return runtime


def compile_layers(runtime: Runtime, asked: bool | str) -> None:
    """Compile each layer of this rank by itself, as :attr:`Options.compile` asks, or undo it.

    Of a layer with a mixture, the modules beside the mixture are compiled. ``"auto"`` compiles where torch's compiler
    makes Triton kernels for the rank's device. Beside fused adapters, and under ``recompute="elementwise"``, compiled
    layers keep of a pass what products and attention return, and little else.
    """
    backend = asked
    if asked is True or (asked == "auto" and is_fused(runtime.mesh.device)):
        backend = "inductor"
    elif asked == "auto":
        backend = False
    if backend == runtime.compiled:
        return
    runtime.compiled = backend
    allow_recompiles()
    repeats = recomputed(runtime.plan).elementwise or runtime.part(FusedAdapters) is not None
    made = repeating_backend(backend) if repeats and backend else backend
    for module in _modules_to_compile(runtime):
        module.compile(backend=made) if made else undo_compile(module)


def _modules_to_compile(runtime: Runtime) -> Iterator[nn.Module]:
    """Yield this rank's layers; of those with mixtures, which are so many graphs that compiling takes minutes, the
    modules that hold none.
    """
    mixtures = [f"{planned.name}." for planned in runtime.plan.mixtures]
    routed = {planned.layer for planned in runtime.plan.mixtures}
    for layer in filter(runtime.is_local, runtime.plan.layers):
        module = runtime.model.get_submodule(layer)
        if layer not in routed:
            yield module
            continue
        for name, child in module.named_children():
            if not any(mixture.startswith(f"{layer}.{name}.") for mixture in mixtures):
                yield child


def take_apart(runtime: Runtime) -> LocalWeights:
    """Undo :func:`assemble`: leave the model on the meta device, and return this rank's shards in its memory."""
    compile_layers(runtime, False)
    held = {planned.name: parameter for planned, parameter in runtime.parameters()}
    shares = LocalWeights(
        {name: local_tensor(parameter).detach() for name, parameter in held.items()}
    )
    trains = {name: parameter.requires_grad for name, parameter in held.items()}
    assert runtime.restore is not None
    runtime.restore()
    for part in runtime.parts:
        part.take_out(runtime, shares)
    quantized = runtime.plan.quantized_weights
    made: dict[str, nn.Parameter] = {}
    for planned in runtime.plan.parameters:
        if (
            not runtime.plan.is_local(runtime.mesh.pp_rank, planned.name)
            or planned.name in quantized
        ):
            continue
        owner = planned.tied_to or planned.name
        if owner not in made:
            shape = planned.model_shape(runtime.mesh.ranks)
            empty = torch.empty(shape, dtype=shares.tensors[owner].dtype, device="meta")
            made[owner] = nn.Parameter(empty, requires_grad=trains[owner])
        put_parameter(runtime.model, planned.name, made[owner])
    runtime.forget_parameters()
    return shares
