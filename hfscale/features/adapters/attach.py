"""Attach adapters to a model that has its local sizes, before parts are installed."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.peft import LORA_EMBEDDING_A
from ...distributed.mesh import Mesh
from ...distributed.ops.packed_weights import packings_of, shown_unpacked
from ...errors import PlanError
from ...plan import Plan
from ...train.runtime import Part, Runtime
from ...train.runtime.parameter_names import owner_of, parameter_at
from ...train.runtime.shards import LocalWeights
from ...train.runtime.writing import all_or_none
from .adapter_edges import install_adapter_edges
from .adapter_structure import guard_methods, narrowed, quietly, targets_of
from .first_values import initialize_adapters
from .merge_adapters import dequantized_share, put_back
from .planned import type_beside, wrap_and_plan
from .storage import load_adapter, stored_names


@dataclass(eq=False)
class Adapters(Part):
    """A part with PEFT's adapters of one model."""

    peft_model: Any  # PEFT's model around this rank's model
    whole: Any  # PEFT's model around the full model, on the meta device
    name: str  # the adapter's name in PEFT
    stock_plan: Plan  # the plan without adapters
    source: str | None = None  # the path or Hub id of the saved adapter they were loaded from, if any

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Make adapters compute with those of the other tensor ranks. Installed after the edges of blocks."""
        install_adapter_edges(runtime)

    def stored_names(self, runtime: Runtime) -> dict[str, str]:
        """Return the keys of PEFT's file and the parameters they hold."""
        return {key: name for name, key in stored_names(self.whole, self.name, runtime.plan, "auto").items()}


def attach_adapters(
    model: nn.Module,
    template: nn.Module,
    config: Any,
    plan: Plan,
    mesh: Mesh,
    shares: dict[str, Tensor],
    *,
    source: str | None = None,
    name: str = "default",
    seed: int | None = 0,
) -> tuple[Adapters, Plan]:
    """Wrap the modules that ``config`` targets, and add the adapters' values to ``shares``; return the adapters, and
    the plan with their parameters. The ``model`` has local sizes, and is on the meta device if ``shares``, this rank's
    final shards by name, hold the values; ``template``, the full stock model on the meta device, is wrapped too. New
    adapters are drawn by ``seed`` (``None``: torch's current RNG state), others loaded from ``source``.
    """
    whole, planned = wrap_and_plan(template, config, plan, new=source is None, name=name)
    held = [adapter for adapter in planned.adapters if plan.is_local(mesh.pp_rank, adapter.name)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with shown_unpacked(model):
            here = narrowed(config, *targets_of(held))
            for field in ("init_lora_weights", "init_weights", "init_ia3_weights"):
                if hasattr(here, field):  # values come later; some cannot be computed from shards of a weight
                    setattr(here, field, False)
            local = quietly(model, here, name)
        local.base_model.peft_config[name] = whole.peft_config[name]
        _give_local_shapes(model, planned, mesh, shares)
        read = partial(dequantized_share, model, planned)
        made = initialize_adapters(whole, config, name, planned, mesh, shares, seed, read)
        if source is not None:
            with all_or_none(mesh, f"{source} could not be loaded"):
                made.update(load_adapter(source, whole, name, planned, mesh))
    except Exception:  # leave the model as it was, without adapters
        put_back(model)
        for weight in trained:
            weight.requires_grad_(True)
        raise
    guard_methods(local, whole, mesh.layout.total_size)
    for parameter, share in made.items():
        kept: Any = shares.get(parameter)  # a trained weight of the model; may be on another stage
        if kept is None:
            kept = parameter_at(model, parameter)
        shares[parameter] = share.to(kept.dtype)
    return Adapters(local, whole, name, plan, source), planned


def _give_local_shapes(model: nn.Module, plan: Plan, mesh: Mesh, shares: dict[str, Tensor]) -> None:
    """Give every adapter parameter the plan's local shape, and the dtype that PEFT gives parameters with memory."""
    here = dict(model.named_parameters(remove_duplicate=False))
    made: dict[str, nn.Parameter] = {}
    for adapter in plan.adapters:
        if not plan.is_local(mesh.pp_rank, adapter.name):
            continue
        if adapter.name not in here:
            raise PlanError(
                f"PEFT did not create {adapter.name}, which the plan has on this rank: report it with the peft_config"
            )
        planned, old = plan.by_name[adapter.name], here[adapter.name]
        shape = planned.model_shape(mesh.ranks)
        if tuple(old.shape) != shape and adapter.kept_in != LORA_EMBEDDING_A:
            raise PlanError(
                f"{adapter.name} must have the shape {shape} on this rank, got {tuple(old.shape)}: report it with the "
                "peft_config"
            )
        owner = adapter.tied_to or adapter.name
        if owner not in made:
            module, attribute = owner_of(model, adapter.base)
            packing = packings_of(module).get(attribute)
            kept = shares[plan.by_name[adapter.base].tied_to or adapter.base]
            base = kept.dtype if packing is None else packing.dtype
            empty = torch.empty(shape, dtype=type_beside(base, adapter.kept_in), device="meta")
            made[owner] = nn.Parameter(empty, requires_grad=old.requires_grad)
        holder, attribute = owner_of(model, adapter.name)
        setattr(holder, attribute, made[owner])
