"""List the features and axes of a layout: the functions that plan them, and the runtime objects that install them into
a model. Install all of them, or remove them again.

This is the only file of ``hfscale.api`` that lists the features and axes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._compat.peft import wrapped_by_peft
from .._compat.torch import allow_recompiles, undo_compile
from ..config.options import Options
from ..distributed.mesh import Mesh
from ..distributed.ops.fused import is_fused
from ..extensions import all_provided, imported
from ..features.fp8.plan import gathers_in_8_bits, multiplies_in_8_bits, plan_float8
from ..features.memory.plan import moves_activations, plan_memory, recomputes
from ..features.precision.plan import (
    computes_in_16_bits,
    copies_parameters,
    plan_precision,
    replaces_kernels,
    scales_loss,
)
from ..features.prediction.plan import plan_prediction, predicts_ahead
from ..features.quantization.plan import holds_4_bits, holds_quantized
from ..features.towers.plan import plan_towers
from ..parallel.context.plan import cuts_sequences, plan_context
from ..parallel.data.plan import has_data_ranks, has_one_batch, plan_data
from ..parallel.experts.plan import exchanges_tokens, has_mixtures, has_routers, plan_experts
from ..parallel.pipeline.plan import has_stages, plan_pipeline
from ..parallel.tensor.plan import plan_own_loss, plan_tensor, plan_vocabulary
from ..parallel.tensor.sequence.plan import plan_sequence
from ..plan import Plan
from ..plan.drafting.draft import Draft, Planned
from ..plan.feature_plans import recomputed
from ..train.guards.part import StockCode
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
"""Functions that plan one feature each, in order: each reads what the functions before it have decided from the plan
under construction (:class:`Draft`).

A function adds shardings of tensors, partial gradients, modules and stages to the plan. It also adds every problem that
it finds, with the valid values, since all problems are reported at once. If the layout does not use the feature, the
function adds nothing.
"""


def plan_parts() -> tuple[Callable[[Draft], None], ...]:
    """Return the functions that plan one feature each: those of this package, followed by those of extensions."""
    return (*PLAN_PARTS, *all_provided("plan_parts"))


def _always(model: Planned) -> bool:
    return True


def _has_adapters(model: Planned) -> bool:
    """Return whether the model has adapters: in the plan, or added by PEFT's own functions in one process."""
    return bool(model.plan.adapters) or wrapped_by_peft(model.model)


_ADAPTERS = "hfscale.features.adapters.attach:Adapters"
PARTS: dict[str, Callable[[Planned], bool]] = {
    "hfscale.features.precision.part:LossScaling": scales_loss,
    "hfscale.features.quantization.repeated_linears:RepeatedLinears": holds_4_bits,
    "hfscale.features.precision.liger_kernels:LigerKernels": replaces_kernels,
    "hfscale.features.precision.part:ParameterCasts": copies_parameters,
    "hfscale.features.fp8.part:Float8": multiplies_in_8_bits,
    "hfscale.parallel.experts.part:ExpertParallel": exchanges_tokens,
    "hfscale.parallel.tensor.part:TensorParallel": _always,
    _ADAPTERS: _has_adapters,
    "hfscale.features.adapters.fused_lora:FusedAdapters": _has_adapters,
    "hfscale.parallel.tensor.part:VocabularyLoss": _always,
    "hfscale.parallel.context.part:ContextParallel": cuts_sequences,
    "hfscale.train.packed_rows.guard:PackedRows": _always,  # inside the recomputed region
    "hfscale.features.memory.recomputation:Recomputation": recomputes,
    "hfscale.features.memory.kept_activations:KeptActivations": moves_activations,
    "hfscale.parallel.tensor.part:RandomStreams": _always,
    "hfscale.train.guards.part:SharedBatch": _always,
    "hfscale.parallel.experts.part:ExpertRouting": has_routers,
    "hfscale.parallel.experts.replay:RouteReplay": has_mixtures,
    "hfscale.features.prediction.part:MultiTokenPrediction": predicts_ahead,
    "hfscale.parallel.data.part:DataParallel": has_data_ranks,
    "hfscale.parallel.data.weights:UnshardedWeights": has_one_batch,
    "hfscale.features.fp8.part:Float8Gather": gathers_in_8_bits,
    "hfscale.features.quantization.part:Quantization": holds_quantized,
    "hfscale.features.precision.part:Autocast": computes_in_16_bits,
    "hfscale.parallel.pipeline.part:PipelineStages": has_stages,
}
"""Map of a feature's class (``module:class``), whose object installs the feature into a model, to a function that
returns whether a planned model needs the feature. The module is imported only if it does.

The order is the order of installation: features that change modules (from the inside out), that hook the model, that
wrap it and hold its weights, and that run it. Features of extensions, and the guards of the model, are installed after
these.
"""


def parts_of(runtime: Runtime, adapters: Part | None) -> tuple[Part, ...]:
    """Return the runtime objects of the features that a planned model needs, in the order of their installation.
    ``adapters`` is the object for adapters, if the model has one already.
    """
    needed = [place for place, is_asked in PARTS.items() if is_asked(runtime)]
    parts = [adapters if place == _ADAPTERS else imported(place)() for place in needed]
    added = [kind() for kind in all_provided("parts")]
    every = (*parts, *added, StepTimes(), StockCode(_save_pretrained))
    return tuple(part for part in every if part is not None and part.is_needed(runtime))


def _save_pretrained(*given: Any, **options: Any) -> None:
    from ..checkpoint.save import save_pretrained

    save_pretrained(*given, **options)


def assemble(
    model: Any,
    plan: Plan,
    mesh: Mesh,
    options: Options,
    weights: LocalWeights | None,
    adapters: Part | None = None,
) -> Runtime:
    """Install all features that the plan needs into a model that has this rank's sizes, and return the model's runtime.
    ``weights`` are the rank's shards, or ``None`` if they are in the model already.
    """
    look_again = watch(model)
    runtime = Runtime(model, plan, mesh, options, parts=())
    runtime.parts = parts_of(runtime, adapters)
    for part in runtime.parts:
        part.install(runtime, weights)
    runtime.attach()
    compile_layers(runtime, options.compile)
    runtime.restore = look_again()
    return runtime


def compile_layers(runtime: Runtime, asked: bool | str) -> None:
    """Compile each layer of this rank separately, according to :attr:`Options.compile`, or undo the compilation.

    In a mixture-of-experts layer, only the modules that contain no experts are compiled. ``"auto"`` compiles where
    torch's compiler makes Triton kernels for the rank's device. With fused adapters, and under
    ``recompute="elementwise"``, compiled layers save little more than the results of matrix products and attention.
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
    made = _backend(runtime, backend) if backend else None
    for module in _modules_to_compile(runtime):
        module.compile(backend=made) if made else undo_compile(module)


def _backend(runtime: Runtime, name: str | bool) -> Any:
    """Return the torch.compile backend ``name``. If the plan recomputes elementwise operators, or adapters are fused,
    return a backend that also recomputes elementwise operators in the backward pass.
    """
    from .._compat.torch_compiler import repeating_backend
    from ..features.adapters.fused_lora import FusedAdapters

    repeats = recomputed(runtime.plan).elementwise or runtime.part(FusedAdapters) is not None
    return repeating_backend(name) if repeats else name


def _modules_to_compile(runtime: Runtime) -> Iterator[nn.Module]:
    """Yield the modules of this rank to compile: each dense layer, and in each mixture-of-experts layer the children
    without experts. Experts with their router have so many graphs that compiling them would take minutes.
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
    """Remove from a model what :func:`assemble` installed: leave the model on the meta device, and return this rank's
    shards without copying them.
    """
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
        owner = planned.first_name
        if owner not in made:
            shape = planned.model_shape(runtime.mesh.ranks)
            empty = torch.empty(shape, dtype=shares.tensors[owner].dtype, device="meta")
            made[owner] = nn.Parameter(empty, requires_grad=trains[owner])
        put_parameter(runtime.model, planned.name, made[owner])
    runtime.forget_parameters()
    return shares
