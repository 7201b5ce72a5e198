"""Shard (``dp_shard``) and replicate (``dp_replicate``) a model over the data mesh with torch's FSDP2.

FSDP2 wraps the plain local tensors that remain after the model axes are applied (ZeRO stage 3, Rajbhandari et al. 2020;
Zhao et al. 2023). Both axes use this mechanism: replicas are the outer dim of a two-dim mesh (HSDP), even if nothing is
sharded.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from ..._compat.torch import own_modules, own_parameters
from ..._compat.torch_device import accelerators
from ..._compat.torch_fsdp import (
    agree_on_gradients,
    gather_root,
    managed_places,
    read_whole_shards,
    reduce_now,
    shard_by_type,
)
from ..._compat.transformers.classes import class_name
from ..._compat.transformers.computing import stays_in_32_bits
from ...config.options import MIXED_PRECISIONS, Options
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...models.family_limits import READ_BY_CACHE
from ...models.precision import WIDENS_INSIDE
from ...plan import Plan
from ...plan.feature_plans import TowersPlan, offloaded
from ...plan.parameter import data_axes
from ...train.runtime.parameter_names import (
    module_at,
    owner_of,
    stock_name,
)
from .gradient_compression import compresses


def wrapped_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 wraps, ``model`` first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(wrapped: Sequence[FSDPModule]) -> None:
    """Free all gathered weights, also those that a forward pass without a backward pass has not freed."""
    for module in wrapped:
        module.reshard()


def _gathered(wrapped: Sequence[FSDPModule]) -> list[FSDPModule]:
    def is_gathered(module: Any) -> bool:
        return any(place.is_gathered() for place in managed_places(module, inner=False))

    return [module for module in wrapped if is_gathered(module)]


@contextmanager
def as_shards(wrapped: Sequence[FSDPModule]) -> Iterator[None]:
    """Reshard all weights for the ``with`` block; gather again at its end the weights that were gathered at its start.

    If the block changes weights, a pending backward pass therefore reads the changed weights.
    """
    gathered = _gathered(wrapped)
    reshard(wrapped)
    try:
        yield
    finally:
        for module in gathered:
            module.unshard()


def refuse_calls_past_the_model(model: Any) -> None:
    """Make a direct call of the base model, past the model with its head, raise :class:`ConfigError`.

    FSDP2 gathers the weights that are in no layer, such as the embedding's, only if the model itself is called.
    """
    inside = getattr(model, "base_model", model)
    if inside is model:
        return
    modules = set(inside.modules())
    around = next(
        (place for place in managed_places(model, inner=False) if place.module in modules), None
    )
    if around is None:
        return

    def refuse(*_: Any) -> None:
        if not around.is_gathered():
            raise ConfigError(
                f"{type(inside).__name__} was called directly, but FSDP2 gathers the weights outside of its layers "
                f"(for example {around.name} of {type(around.module).__name__}) only if {class_name(model)} is "
                "called: call the model itself (output_hidden_states=True returns its layers' outputs), or load the "
                "class without a head"
            )

    inside.register_forward_pre_hook(refuse)


def give_up_whole_weights(model: Any) -> None:
    """Make the model reshard its parameters after every forward pass without gradients.

    FSDP2 leaves gathered weights registered as parameters, for a backward pass. An optimizer that is made at that time
    would update these temporary weights in vain, and ``zero_grad`` would miss every gradient. Weights that an earlier
    pass has left gathered for its own backward pass are not resharded.
    """
    generating: list[bool] = []
    awaited: list[FSDPModule] = []
    generate, wrapped = getattr(model, "generate", None), wrapped_modules(model)

    def before(*_: Any) -> None:
        if not generating and not torch.is_grad_enabled():
            awaited[:] = _gathered(wrapped)

    def after(*_: Any) -> None:
        if not generating and not torch.is_grad_enabled():
            reshard([module for module in wrapped if module not in awaited])

    model.register_forward_pre_hook(before, prepend=True)  # before FSDP2 gathers
    model.register_forward_hook(after)
    if generate is None:
        return

    @functools.wraps(generate)
    def generate_then_reshard(*args: Any, **kwargs: Any) -> Any:
        generating.append(True)
        gather_root(model)  # generate calls an encoder by itself, without the model's hooks
        try:
            # transformers recognizes FSDP2 models, and runs the same number of steps on all ranks.
            return generate(*args, **kwargs)
        finally:
            generating.pop()
            reshard(wrapped)

    model.generate = generate_then_reshard


def _policy(plan: Plan, options: Options) -> MixedPrecisionPolicy:
    # Like autocast, mixed precision leaves float64 parameters unchanged.
    as_it_is = plan.family in WIDENS_INSIDE or any(p.dtype == torch.float64 for p in plan.owned())
    dtype = MIXED_PRECISIONS["no" if as_it_is else options.mixed_precision]
    return (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        if dtype
        else MixedPrecisionPolicy()
    )


def apply_data_axes(model: nn.Module, plan: Plan, mesh: Mesh, options: Options) -> None:
    """Wrap every layer with FSDP2, then the rest of the model.

    The option ``mixed_precision`` has these effects:

    - ``"bf16"``: FSDP2 computes in bfloat16; master weights, reduced gradients and optimizer state keep the parameters'
      own dtype.
    - ``"no"``: FSDP2 changes no dtypes. The same holds for models with float64 parameters, and for families whose mixed
      precision is left to autocast.
    - ``"bf16_params"``: FSDP2 casts neither the inputs of layers nor the parameters that transformers keeps in float32.
    """
    data_mesh = _data_mesh(plan, mesh)
    policy = _policy(plan, options)
    # Resharding after the forward pass saves memory only if weights are sharded.
    reshard = mesh.layout.dp_shard > 1 and plan.family not in READ_BY_CACHE
    on_host = offloaded(plan).parameters
    offload = (
        CPUOffloadPolicy(pin_memory=accelerators().is_available()) if on_host else OffloadPolicy()
    )
    alone = _shard_experts(model, plan, mesh, policy, offload)
    how: dict[str, Any] = {
        "ignored": alone,
        "mesh": data_mesh,
        "mp_policy": policy,
        "offload_policy": offload,
    }
    inner = replace(policy, cast_forward_inputs=not options.casts_parameters)
    stays = stays_in_32_bits(model)
    if options.casts_parameters:
        how["uncast"] = {
            parameter for name, parameter in model.named_parameters() if stays(stock_name(name))
        }
    towers = plan.feature(TowersPlan)
    layers, lent = _layers(model, plan, mesh)
    shared = _of_several_layers(model, plan, mesh, layers)
    of_layers = {**how, "mp_policy": inner, "ignored": alone | set(shared)}
    for module in (*lent, *layers):
        shard_by_type(module, reshard_after_forward=reshard, **of_layers)
    always = len(layers) - sum(plan.is_local(mesh.pp_rank, each) for each in plan.optional_layers)
    # In MoE layers the CPU waits for routes before it reaches the next layer, which is therefore prefetched explicitly.
    for layer, following in pairwise(layers[:always] if plan.mixtures else []):
        layer.set_modules_to_forward_prefetch(
            [m for m in following.modules() if isinstance(m, FSDPModule)]
        )
    with _shown_beside(model, list(shared.values())):
        shard_by_type(model, reshard_after_forward=False, **how)
    read_whole_shards(model)
    give_up_whole_weights(model)
    if towers is not None:  # if a rank's batch has no images, its towers get no gradient
        inside = {
            module for name, module in model.named_modules() if towers.holds(stock_name(name))
        }
        owners = {owner_of(model, item)[0] for item in towers.items if item in plan.by_name}
        agree_on_gradients(model, inside | owners, partial(_found_by_any, mesh))


def _of_several_layers(
    model: nn.Module, plan: Plan, mesh: Mesh, layers: Sequence[nn.Module]
) -> dict[nn.Parameter, nn.Module]:
    """Return the adapter parameters that belong to several layers, each with the module that holds the parameter."""
    held = Counter(parameter for layer in layers for parameter in layer.parameters())
    shared: dict[nn.Parameter, nn.Module] = {}
    for adapter in plan.adapters:
        if plan.is_local(mesh.pp_rank, adapter.name):
            holder, attribute = owner_of(model, adapter.name)
            parameter = own_parameters(holder)[attribute]
            if parameter is not None and held[parameter] > 1:
                shared[parameter] = holder
    return shared


@contextmanager
def _shown_beside(model: nn.Module, holders: Sequence[nn.Module]) -> Iterator[None]:
    """Register ``holders``, modules inside of layers, as children of the model for the duration of the ``with`` block.

    FSDP2 then wraps their parameters with the model and not with a layer.
    """
    children = own_modules(model)
    names = [f"held_{number}" for number in range(len(holders))]
    children.update(zip(names, holders, strict=True))
    try:
        yield
    finally:
        for name in names:
            del children[name]


def _layers(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
) -> tuple[list[Any], list[Any]]:
    """Return two lists of modules on this rank: its layers that are not inside a vision or audio tower, and modules of
    the first layer that are also held by this rank because later layers need their results.
    """
    towers = plan.feature(TowersPlan)
    loans = plan.stages.loans if plan.stages is not None else ()
    local = [layer for layer in plan.layers if plan.is_local(mesh.pp_rank, layer)]
    layers = [
        module_at(model, layer) for layer in local if towers is None or not towers.holds(layer)
    ]
    return layers, [
        module_at(model, loan.name) for loan in loans if plan.is_local(mesh.pp_rank, loan.name)
    ]


def _found_by_any(mesh: Mesh, here: list[bool]) -> list[bool]:
    """Return, for each flag in ``here``, whether it is true on at least one data rank; collective."""
    anywhere = torch.tensor(here, dtype=torch.uint8, device=mesh.device)
    for group in mesh.loss_groups:
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in anywhere.tolist()]


def _shard_experts(
    model: nn.Module, plan: Plan, mesh: Mesh, policy: MixedPrecisionPolicy, offload: OffloadPolicy
) -> set[nn.Parameter]:
    """Wrap experts with FSDP2 over the ranks that hold the same experts.

    Experts that are on one rank only are not wrapped; their parameters are made DTensors, which optimizers expect, and
    are returned.
    """
    layout = mesh.layout
    alone = set[nn.Parameter]()
    # Inputs are not cast: weights of routes stay exact, and tokens arrive in the right dtype.
    policy = replace(policy, cast_forward_inputs=False)
    shards = layout.size("edp_shard")
    for experts in (e for e in plan.experts if plan.is_local(mesh.pp_rank, e.name)):
        module = model.get_submodule(experts.name)
        assert mesh.expert_mesh is not None
        alike = policy.param_dtype is None and not isinstance(offload, CPUOffloadPolicy)
        if shards * layout.size("edp_replicate") == 1 and alike:
            for name, whole in list(module.named_parameters()):
                local = DTensor.from_local(
                    whole.detach(), mesh.expert_mesh["edp_shard"], [Shard(0)], run_check=False
                )
                holder, attribute = owner_of(module, name)
                holder.register_parameter(attribute, nn.Parameter(local, whole.requires_grad))
            alone |= set(module.parameters())
            continue
        dims: dict[nn.Parameter, int] = {}
        for attribute, p in module.named_parameters():
            name = f"{experts.name}.{attribute}"
            planned = plan.by_name[name if name in plan.by_name else stock_name(name)]
            # Quantized weights are [data ranks, bytes], so they are sharded along dim 0.
            dims[p] = 0 if p.dtype == torch.uint8 else planned.cuts[-1].dim
        shard_by_type(
            module,
            ignored=set(),
            mesh=_data_mesh(plan, mesh, spread=True),
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=shards > 1,
            shard_placement_fn=(lambda p, dims=dims: Shard(dims[p])) if shards > 1 else None,  # type: ignore[misc]
        )
    return alone


def _data_mesh(plan: Plan, mesh: Mesh, spread: bool = False) -> DeviceMesh:
    """Return the device mesh over which FSDP2 shards parameters and reduces gradients.

    By default this is the mesh of the data axes; with ``spread``, it is the mesh of the experts' data axes. If
    gradients are compressed, the axis of replicas is left out.
    """
    device_mesh = mesh.expert_mesh if spread else mesh.device_mesh
    assert device_mesh is not None
    replicate, shard = data_axes(spread)
    both = mesh.layout.size(replicate) > 1 and not compresses(plan)
    return device_mesh[(replicate, shard) if both else (shard,)]


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Set whether the next backward pass reduces gradients over the data axes; disable this while accumulating."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


@contextmanager
def one_reduction(model: Any, *, backward: bool, regather: bool) -> Iterator[None]:
    """Gather weights once for all passes inside the ``with`` block, and reduce gradients once at the end of the block.

    With ``regather``, a layer's weights are gathered for each pass and resharded after it; weights that are in no layer
    stay gathered.
    """
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    model.set_reshard_after_forward(False, recurse=not regather)
    model.set_reshard_after_backward(False, recurse=not regather)
    try:
        yield
        if backward:
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(True)
            reduce_now(model)
    finally:
        reshard(wrapped_modules(model))
