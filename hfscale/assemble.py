"""Make a model that has its local sizes compute with the other ranks, and undo that."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .adapters import Adapters
from .adapters.edges import install_adapter_edges
from .errors import ConfigError
from .guards import refuse_changes, refuse_stock_accelerator, refuse_stock_clipping
from .mesh import Mesh
from .parallel.data import (
    MIXED_PRECISIONS,
    add_up_gradients,
    apply_data_axes,
    install_local_weights,
    reduce_microbatch,
    reshard,
)
from .parallel.experts import RoutingConfig, install_experts, install_forward_contexts
from .parallel.pipeline import install_pipeline
from .parallel.tensor import install_edges, install_generate, install_loss
from .parallel.tensor.random import synchronize_before_training
from .plan import Plan
from .quantization.install import install_quantized, take_quantized
from .runtime import Runtime, local_tensor
from .runtime.batches import compare_first
from .runtime.local_weights import LocalWeights
from .runtime.names import owner_of
from .runtime.snapshot import watch


def assemble(
    model: Any,
    planned: Plan,
    mesh: Mesh,
    mixed_precision: str,
    routing: RoutingConfig | None,
    shares: LocalWeights | None,
    adapters: Adapters | None = None,
) -> Runtime:
    """Edges, loss, data axes, weights (where they are not in place yet), bookkeeping."""
    stop = watch(model)
    runtime = Runtime(model, planned, mesh, mixed_precision=mixed_precision, adapters=adapters, options=routing)
    install_experts(runtime, routing)
    install_edges(runtime)
    install_adapter_edges(runtime)
    install_loss(runtime)
    install_generate(model, mesh)
    synchronize_before_training(runtime)
    if mesh.sharing is not None and mesh.layout.size("pp") == 1:
        runtime.first_batch = compare_first(model, mesh.sharing)
    install_forward_contexts(runtime)
    apply_data_axes(model, planned, mesh, mixed_precision)
    if shares is not None:
        install_local_weights(model, shares.tensors, planned, mesh)
        install_quantized(shares)
    if mesh.batch_world == 1 and mixed_precision != "no":
        _autocast(model, mesh.device, MIXED_PRECISIONS[mixed_precision])
    install_pipeline(runtime, settle=lambda: add_up_gradients(model), reduce=lambda: reduce_microbatch(model))
    if mesh.layout.total_size > 1:
        refuse_stock_accelerator()
        refuse_stock_clipping(runtime)
    refuse_changes(model, mesh.layout)
    if mesh.layout.total_size > 1 or adapters is not None:  # with adapters, the host would write its weights wrapped
        model.save_pretrained = _refuse_partial_save
    runtime.attach()
    runtime.undo = stop()
    return runtime


def take_apart(runtime: Runtime) -> LocalWeights:
    """Undo :func:`assemble`: the model is left with its local sizes on the meta device.

    Returns:
        this rank's final shares, in the memory that the model had.
    """
    reshard(runtime.model)
    shares = LocalWeights(
        {planned.name: local_tensor(parameter).detach() for planned, parameter in runtime.parameters()}
    )
    trains = {planned.name: parameter.requires_grad for planned, parameter in runtime.parameters()}
    assert runtime.undo is not None
    runtime.undo()
    take_quantized(runtime.model, shares)
    quantized = runtime.plan.quantized.weights if runtime.plan.quantized is not None else ()
    made: dict[str, nn.Parameter] = {}
    for planned in runtime.plan.parameters:
        if not runtime.plan.is_local(runtime.mesh.ranks["pp"], planned.name) or planned.name in quantized:
            continue
        owner = planned.tied_to or planned.name
        if owner not in made:
            shape = planned.model_shape(runtime.mesh.ranks)
            empty = torch.empty(shape, dtype=shares.tensors[owner].dtype, device="meta")
            made[owner] = nn.Parameter(empty, requires_grad=trains[owner])
        module, attribute = owner_of(runtime.model, planned.name)
        module._parameters[attribute] = made[owner]
    return shares


def _refuse_partial_save(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "model.save_pretrained would write what this rank holds, adapters and all, as if it were the model: call "
        "hfscale.save_pretrained(model, directory) on every rank"
    )


def _autocast(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Mixed precision where there are no data axes whose wrapper does it: torch's autocast around the forward pass."""
    forward: Callable[..., Any] = model.forward

    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return forward(*args, **kwargs)

    autocast_forward.__wrapped__ = forward  # type: ignore[attr-defined]  # the host inspects forward's signature
    model.forward = autocast_forward  # type: ignore[method-assign]
