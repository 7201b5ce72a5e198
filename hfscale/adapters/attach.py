"""Put adapters around a model that has its local sizes and computes with nobody yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._host.peft import LORA_EMBEDDING_A
from ..errors import PlanError
from ..mesh import Mesh
from ..plan import Plan
from ..quantization.packed import shown_unpacked
from ..quantization.quantized_modules import dequantized
from ..runtime import Part, Runtime
from ..runtime.local_weights import LocalWeights
from ..runtime.names import owner_of, parameter_at
from ..runtime.writing import all_or_none
from .adapter_edges import install_adapter_edges
from .first_values import initialize_adapters
from .guard import guard_methods
from .merge import put_back
from .planned import type_beside, wrap_and_plan
from .storage import load_adapter, save_adapter, stored_names, write_adapter_config
from .structure import narrowed, quietly, targets_of


@dataclass(eq=False)
class Adapters(Part):
    """What PEFT put around the modules of one model, as a part of it.

    Attributes:
        peft_model: PEFT's model around what this rank holds.
        whole: the same around the whole model, without memory.
        name: the adapter's, among others that PEFT could have.
        stock_plan: the plan without them.
        source: the path or Hub id of the saved adapter that they were, if any.
    """

    peft_model: Any
    whole: Any
    name: str
    stock_plan: Plan
    source: str | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Let adapters compute with those of the other tensor ranks. Comes behind the edges of blocks."""
        install_adapter_edges(runtime)

    def save(self, runtime: Runtime, directory: Path) -> bool:
        """Write the adapter in PEFT's format; collective."""
        save_adapter(runtime, self.whole, self.name, directory)
        return True

    def stored_names(self, runtime: Runtime) -> dict[str, str]:
        """The keys of PEFT's file."""
        return {key: name for name, key in stored_names(self.whole, self.name, runtime.plan, "auto").items()}

    def write_configs(self, runtime: Runtime, directory: Path) -> None:
        """PEFT's config."""
        write_adapter_config(self.whole, self.name, directory)


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
    """Wrap the modules of ``model`` as ``config`` says; ``shares`` get those of the adapters.

    Args:
        model: what this rank holds, with local sizes, on the meta device where ``shares`` hold the values.
        template: the whole stock model on the meta device; it is wrapped too.
        plan: of the stock model.
        shares: this rank's final shares, by name.
        source: a saved adapter to go on with.
        seed: of what is random in new adapters; ``None`` for torch's random numbers as they are.

    Returns:
        the adapters, and the plan with their parameters.

    Raises:
        ConfigError: the config asks for what hfscale or PEFT does not know, or matches nothing.
        CheckpointError: the saved adapter does not fit.
    """
    whole, planned = wrap_and_plan(template, config, plan, new=source is None, name=name)
    held = [adapter for adapter in planned.adapters if plan.is_local(mesh.ranks["pp"], adapter.name)]
    with _unchanged_after_failure(model):
        with shown_unpacked(model):
            local = quietly(model, _uninitialized(narrowed(config, *targets_of(held))), name)
        local.base_model.peft_config[name] = whole.peft_config[name]
        _give_local_shapes(model, planned, mesh, shares)
        made = initialize_adapters(
            whole, config, name, planned, mesh, shares, seed, partial(_dequantized, model, planned)
        )
        if source is not None:
            with all_or_none(mesh, f"{source} could not be loaded"):
                made.update(load_adapter(source, whole, name, planned, mesh))
    guard_methods(local, whole, mesh.layout.total_size)
    for parameter, share in made.items():
        kept: Any = shares.get(parameter)  # a saved weight of the model's; its module may be on another stage
        if kept is None:
            kept = parameter_at(model, parameter)
        shares[parameter] = share.to(kept.dtype)
    return Adapters(local, whole, name, plan, source), planned


@contextmanager
def _unchanged_after_failure(model: nn.Module) -> Iterator[None]:
    """The model can go on without adapters that could not be put around it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        yield
    except Exception:
        put_back(model)
        for weight in trained:
            weight.requires_grad_(True)
        raise


def _dequantized(model: nn.Module, plan: Plan, name: str) -> Tensor:
    """This rank's share of a quantized weight, over which no data ranks are."""
    share = dequantized(*owner_of(model, name))
    return share.T if plan.quantized is not None and name in plan.quantized.transposed else share


def _uninitialized(config: Any) -> Any:
    """Values come later, and some cannot be made of a part of a weight."""
    for field in ("init_lora_weights", "init_weights", "init_ia3_weights"):
        if hasattr(config, field):
            setattr(config, field, False)
    return config


def _give_local_shapes(model: nn.Module, plan: Plan, mesh: Mesh, shares: dict[str, Tensor]) -> None:
    """Give every adapter's parameter the shape that the plan says, and the type that PEFT gives those with memory.

    PEFT reads some sizes from attributes that keep their global values.
    """
    here = dict(model.named_parameters(remove_duplicate=False))
    made: dict[str, nn.Parameter] = {}
    for adapter in plan.adapters:
        if not plan.is_local(mesh.ranks["pp"], adapter.name):
            continue
        if adapter.name not in here:
            raise PlanError(f"PEFT has not put {adapter.name} around this rank's part of the model")
        planned, old = plan.by_name[adapter.name], here[adapter.name]
        shape = planned.model_shape(mesh.ranks)
        if tuple(old.shape) != shape and adapter.kept_in != LORA_EMBEDDING_A:
            raise PlanError(f"{adapter.name} has the shape {tuple(old.shape)} on this rank, and should have {shape}")
        owner = adapter.tied_to or adapter.name
        if owner not in made:
            base = shares[plan.by_name[adapter.base].tied_to or adapter.base].dtype
            empty = torch.empty(shape, dtype=type_beside(base, adapter.kept_in), device="meta")
            made[owner] = nn.Parameter(empty, requires_grad=old.requires_grad)
        holder, attribute = owner_of(model, adapter.name)
        setattr(holder, attribute, made[owner])
