"""Put adapters around a model that has its local sizes and computes with nobody yet."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._host.peft import COPY, DORA_MAGNITUDES, LORA_EMBEDDING_A
from ..errors import ConfigError, PlanError
from ..mesh import Mesh
from ..plan import Plan
from ..planner.adapters import plan_adapters
from ..quantization.packed import shown_unpacked
from ..quantization.quantized_modules import dequantized
from ..runtime import Part, Runtime
from ..runtime.local_weights import LocalWeights
from ..runtime.names import owner_of, parameter_at
from .adapter_edges import install_adapter_edges
from .first_values import initialize_adapters
from .guard import guard_methods
from .merge import put_back
from .peft_config import check_config, check_over_quantized
from .storage import load_adapter, save_adapter, stored_names, write_adapter_config
from .structure import adapter_parameters, check_matches, narrowed, quietly, target_names, targets_of, wrap


@dataclass(eq=False)
class Adapters(Part):
    """What PEFT put around the modules of one model, as a part of it.

    Attributes:
        peft_model: PEFT's model around what this rank holds.
        whole: the same around the whole model, without memory.
        name: the adapter's, among others that PEFT could have.
        stock_plan: the plan without them.
    """

    peft_model: Any
    whole: Any
    name: str
    stock_plan: Plan

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
    seed: int = 0,
) -> tuple[Adapters, Plan]:
    """Wrap the modules of ``model`` as ``config`` says; ``shares`` get those of the adapters.

    Args:
        model: what this rank holds, with local sizes, on the meta device where ``shares`` hold the values.
        template: the whole stock model on the meta device; it is wrapped too.
        plan: of the stock model.
        shares: this rank's final shares, by name.
        source: a saved adapter to go on with.
        seed: of what is random in new adapters.

    Returns:
        the adapters, and the plan with their parameters.

    Raises:
        ConfigError: the config asks for what hfscale or PEFT does not know, or matches nothing.
        CheckpointError: the saved adapter does not fit.
    """
    _check(config, plan, mesh)
    asked = copy.deepcopy(config)
    whole = _wrapped(template, config, name, plan)
    found = adapter_parameters(whole, plan)
    if source is None:  # PEFT writes down names that it came upon and that this model need not have; tensors decide
        check_matches(asked, config, plan, found)
    planned = plan_adapters(plan, found)
    _refuse_cut_norms(planned)
    _refuse_several_stages(planned)
    held = [adapter for adapter in found if plan.is_local(mesh.ranks["pp"], adapter.name)]
    with _unchanged_after_failure(model):
        with shown_unpacked(model):
            local = quietly(model, _uninitialized(narrowed(config, *targets_of(held))), name)
        local.base_model.peft_config[name] = whole.peft_config[name]
        _give_local_shapes(model, planned, mesh, shares)
        made = initialize_adapters(
            whole, config, name, planned, mesh, shares, seed, partial(_dequantized, model, planned)
        )
        if source is not None:
            made.update(load_adapter(source, whole, name, planned, mesh))
    guard_methods(local, whole, mesh.layout.total_size)
    for parameter, share in made.items():
        kept: Any = shares.get(parameter)  # a saved weight of the model's; its module may be on another stage
        if kept is None:
            kept = parameter_at(model, parameter)
        shares[parameter] = share.to(kept.dtype)
    return Adapters(local, whole, name, plan), planned


def _check(config: Any, plan: Plan, mesh: Mesh) -> None:
    """Refuse what hfscale does not know, before anything is wrapped."""
    check_config(config)
    _refuse_inner_modules(config, plan)
    _refuse_tying(config, plan)
    _refuse_own_dropout(config, mesh)
    if plan.quantized is not None:
        check_over_quantized(config, plan.quantized.bits, mesh.data_world)


def _wrapped(template: nn.Module, config: Any, name: str, plan: Plan) -> Any:
    """PEFT's model around the whole one; PEFT resolves and translates the targets in ``config``."""
    try:
        return wrap(template, config, name)
    except ConfigError as error:
        hint = f"; the model has {', '.join(target_names(plan))}" if "arget modules" in str(error) else ""
        raise ConfigError(f"{error}{hint}") from error


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


def _refuse_inner_modules(config: Any, plan: Plan) -> None:
    # Experts are spread with their router around them, and not in a copy of both.
    mixtures = plan.mixtures if plan.layout.size("ep") > 1 else ()
    cut = (
        *plan.layers,
        *(block.name for block in plan.blocks),
        *(mixture.name.rpartition(".")[0] for mixture in mixtures),
    )
    for wanted in getattr(config, "modules_to_save", None) or ():
        inside = [name for name in cut if _is_in(name, wanted)]
        if inside:
            raise ConfigError(
                f"modules_to_save={wanted!r} is or holds {inside[0]}, and only modules around the layers and single "
                "projections can be copied: name those, or train the whole model without adapters"
            )


def _refuse_tying(config: Any, plan: Plan) -> None:
    """PEFT ties adapters by views of one memory, of which the model's parameters say nothing."""
    tied = next((planned for planned in plan.parameters if planned.tied_to is not None), None)
    if tied is not None and getattr(config, "ensure_weight_tying", False):
        raise ConfigError(
            f"ensure_weight_tying=True is not known to hfscale where weights are tied ({tied.name} is {tied.tied_to}): "
            "leave it out, and adapt modules of the layers"
        )


def _refuse_own_dropout(config: Any, mesh: Mesh) -> None:
    for field in ("rank_dropout", "module_dropout"):
        if getattr(config, field, 0.0) and mesh.layout.total_size > 1:
            raise ConfigError(
                f"{type(config).__name__}({field}=...) draws by the size of each rank's part, so ranks would no longer "
                "draw alike: leave it out, or use one process"
            )


def _refuse_cut_norms(plan: Plan) -> None:
    for adapter in plan.adapters:
        embeds = adapter.base == f"{plan.embedding}.weight" and plan.by_name[adapter.base].cut_over("tp") is not None
        if embeds and adapter.kept_in == DORA_MAGNITUDES:
            raise ConfigError(
                f"{plan.embedding}: DoRA on an embedding that is cut along the vocabulary is not known to hfscale: "
                "leave it out of target_modules, or use tp_size=1"
            )


def _refuse_several_stages(plan: Plan) -> None:
    """Gradients are summed over the stages that have a parameter of the model's, and an adapter is none."""
    for adapter in plan.adapters:
        if sum(plan.is_local(rank, adapter.name) for rank in range(plan.layout.size("pp"))) > 1:
            path = adapter.base.rpartition(".")[0]
            raise ConfigError(
                f"{path} computes on several pipeline stages, where adapters around it would train apart: leave it out "
                f"(exclude_modules=[{path.rpartition('.')[2]!r}]), or use pp_size=1"
            )


def _is_in(name: str, wanted: str) -> bool:
    return f".{wanted}." in f".{name}."


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
            empty = torch.empty(shape, dtype=_type_beside(base, adapter.kept_in), device="meta")
            made[owner] = nn.Parameter(empty, requires_grad=old.requires_grad)
        holder, attribute = owner_of(model, adapter.name)
        setattr(holder, attribute, made[owner])


def _type_beside(base: torch.dtype, kept_in: str) -> torch.dtype:
    """PEFT keeps factors in 32 bits where the weight has fewer, and copies in the weight's type."""
    wide = base.is_floating_point and base.itemsize > 2
    return base if wide or kept_in == COPY else torch.float32
