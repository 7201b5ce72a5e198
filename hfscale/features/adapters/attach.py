"""Attach adapters to a rank's model before communication is installed, with PEFT's own initial values.

Every rank lets PEFT initialize the adapters of one full module at a time, on the CPU, in PEFT's order and with the same
random numbers, and keeps this rank's shard of the values. Adapters of other pipeline stages are initialized, too, to
advance the RNG. If initial values depend on the adapted weight (PiSSA, Meng et al. 2024; OLoRA, Buyukakyuz 2024; DoRA's
magnitudes), the weight is gathered.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.peft import COPIES, IN_FRONT, LORA_EMBEDDING_A, TOKEN_ROWS, delete_adapter
from ..._compat.replaced import attribute_replaced
from ..._compat.torch import own_buffers
from ...distributed.files.sources import refuse_foreign
from ...distributed.mesh import Mesh
from ...distributed.ops.quantized_weights import encodings_of, shown_decoded
from ...distributed.process_groups import add_ties
from ...errors import ConfigError, PlanError
from ...plan import AdapterParameter, Plan
from ...train.runtime import Part, Runtime
from ...train.runtime.parameter_names import owner_of, parameter_at, unwrapped
from ...train.runtime.shards import LocalWeights, gather_full
from ...train.runtime.writing import all_or_none
from .adapter_edges import install_adapter_edges
from .adapter_structure import guard_methods, inject_alone, narrowed, quietly, targets_of
from .merge_adapters import dequantized_share, put_back
from .planned import type_beside, wrap_and_plan
from .prompts import around_local, first_prompt, install_prompts
from .several import directories_of, saved_directories
from .shared_values import buffer_names, share_fixed, stored_buffers
from .storage import (
    DECOMPOSING,
    load_adapter,
    needs_weights,
    starts_by_products,
    stored_names,
)
from .token_rows import first_rows, wrap_local
from .unread_projections import warn_of_unread
from .whole_projections import shown_whole

NOT_ADDED = "the adapter could not be added, and the model is as it was"


@dataclass(eq=False)
class Adapters(Part):
    """Hold and install PEFT's adapters of one model."""

    peft_model: Any  # PEFT's model around this rank's model
    whole: Any  # PEFT's model around the full model, on the meta device
    first: str  # PEFT's name of the adapter that was attached first
    stock_plan: Plan  # the plan without adapters
    # The path or Hub id of the saved adapter from which they were loaded, if any.
    source: str | None = None
    # wrappers whose first factor saves only a shard of its input for the backward pass
    apart: set[nn.Module] = field(default_factory=set)

    @property
    def active(self) -> list[str]:
        """Return PEFT's names of the active adapters."""
        return [self.first] if self.peft_model is None else list(self.peft_model.active_adapters)

    @property
    def name(self) -> str:
        """Return PEFT's name of the active adapter; of several active adapters, the first one's name."""
        return self.active[0]

    @property
    def names(self) -> list[str]:
        """Return PEFT's names of all adapters."""
        return list(self.whole.peft_config)

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install the communication between tensor ranks that adapters need, after the communication of tensor-parallel
        blocks.
        """
        runtime.adapters = self
        self.apart = install_adapter_edges(runtime)
        install_prompts(runtime, self.peft_model)

    def plan_without(self, runtime: Runtime, live: Mapping[str, nn.Parameter]) -> Plan | None:
        """Return the plan without the adapters if PEFT's own functions have merged, unloaded or deleted them."""
        gone = any(adapter.name not in live for adapter in runtime.plan.adapters)
        return self.stock_plan if gone else None

    def read_saved(self, directory: str, runtime: Runtime) -> dict[str, Tensor]:
        """Return this rank's shards of the saved adapter in ``directory``, or of all adapters if a model with several
        adapters was saved. Raise :class:`CheckpointError` if names or shapes in the file differ from the model's.
        """
        shares: dict[str, Tensor] = {}
        found = saved_directories(self.names, self.name, Path(directory))
        for name, path in found.items():
            refuse_foreign(path)
            shares |= load_adapter(str(path), self.whole, name, runtime.plan, runtime.mesh)
            share_fixed(self.whole, self.peft_model, name, runtime.mesh.device)
        return shares

    def stored_names(self, runtime: Runtime) -> dict[str, str]:
        """Map the keys of PEFT's files to the keys of the same tensors in a saved state. For a model with several
        adapters, a key begins with the directory of its file: ``b/KEY``.
        """
        names: dict[str, str] = {}
        for name, directory in directories_of(self.names, Path()).items():
            prefix = f"{directory}/" if directory.name else ""
            names |= {
                f"{prefix}{key}": held for key, held in self._stored_in(name, runtime).items()
            }
        return names

    def _stored_in(self, adapter: str, runtime: Runtime) -> dict[str, str]:
        plan = runtime.plan
        parameters = stored_names(self.whole, adapter, plan, "auto")
        keys = {key: f"weights/{plan.by_name[name].first_name}" for name, key in parameters.items()}
        fixed = stored_buffers(self.whole, adapter)
        return keys | {key: f"buffers/{name}" for key, name in fixed.items()}

    def buffer_names(self) -> dict[str, str]:
        """Map this rank's names of the wrappers' buffers to names that are equal on all ranks."""
        return buffer_names(self.whole, self.name)


def attach_adapters(
    model: nn.Module,
    template: nn.Module,
    config: Any,
    plan: Plan,
    mesh: Mesh,
    shares: dict[str, Tensor],
    *,
    source: str | None,
    name: str = "default",
    seed: int | None,
    autocast: bool = True,
    fused: bool,
    beside: Adapters | None = None,
) -> tuple[Adapters, Plan]:
    """Wrap the modules that ``config`` targets, and add the adapters' values to ``shares``, this rank's final shards by
    name. Return the adapters, and the plan with their parameters.

    ``model`` has local sizes, and is on the meta device if ``shares`` holds its values; ``template``, the full stock
    model on the meta device, is wrapped, too. Values of a new adapter are drawn with ``seed`` (``None``: torch's
    current RNG state); values of a saved adapter are loaded from ``source``. With ``autocast``, factors of 16-bit
    weights are in 32 bits. With ``beside``, the model and the ``plan`` already have other adapters, and the new adapter
    is inactive and frozen.
    """
    new = source is None
    stock_plan = plan if beside is None else beside.stock_plan
    with all_or_none(mesh, NOT_ADDED):
        if new:
            _refuse_loftq(config, mesh)
        around = template if beside is None else copy.deepcopy(beside.whole)
        whole, planned = wrap_and_plan(
            around, config, stock_plan, new, fused, name, autocast, beside is not None
        )
    add_ties(mesh, planned.ties)
    added = [adapter for adapter in planned.adapters if adapter.adapter == name]
    held = [adapter for adapter in added if planned.is_local(mesh.pp_rank, adapter.name)]
    loaded: dict[str, Tensor] = {}
    if source is not None:
        with all_or_none(mesh, f"{source} could not be loaded"):
            loaded = load_adapter(source, whole, name, planned, mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with all_or_none(mesh, NOT_ADDED):
            with shown_whole(model, planned, partial(planned.is_local, mesh.pp_rank)):
                local = _around_local(model, whole, config, name, held, beside)
            local.peft_config[name] = whole.peft_config[name]
            _give_local_shapes(model, planned, held, mesh, shares, autocast)
            share_fixed(whole, local, name, mesh.device)
            _place_buffers(model, mesh.device)
        read = partial(dequantized_share, model, planned)
        drawn = _NewAdapters(config, name, planned, mesh, shares, read)
        if config.is_prompt_learning:
            with _random_numbers(seed, mesh):
                made = first_prompt(model, whole, name, planned, mesh, shares)
        else:
            made = drawn.values(whole.get_base_model(), added, seed)
        made |= first_rows(model, planned, mesh, shares)
        made.update(loaded)
    except Exception:  # restore the model without the adapter
        if beside is None:
            put_back(model)
        elif name in beside.peft_model.peft_config:
            delete_adapter(beside.peft_model, name)
        for weight in trained:
            weight.requires_grad_(True)
        raise
    if mesh.is_first:
        warn_of_unread(planned)
    if mesh.layout.total_size > 1:
        guard_methods(local, whole)
    _keep(made, shares, model, planned.local_names(mesh.pp_rank))
    if beside is not None:
        return replace(beside, whole=whole, apart=set()), planned
    return Adapters(local, whole, name, plan, source), planned


def _refuse_loftq(config: Any, mesh: Mesh) -> None:
    if getattr(config, "init_lora_weights", True) == "loftq" and mesh.device.type == "cpu":
        raise ConfigError(
            "LoraConfig(init_lora_weights='loftq') needs an accelerator, because bitsandbytes computes it, but this "
            "run is on a CPU: use 'pissa', or create the adapter on a machine with a GPU and pass its directory as "
            "peft_config"
        )


def _keep(
    made: Mapping[str, Tensor],
    shares: dict[str, Tensor],
    model: nn.Module,
    names: Mapping[str, str],
) -> None:
    """Write the shards ``made`` (adapters' values, and weights that their initialization has changed) into ``shares``,
    in the dtypes of the shards that they replace, or else of the ``model``'s parameters.
    """
    for parameter, share in made.items():
        kept: Any = shares.get(
            parameter
        )  # a weight of the model that trains with the adapters; may be on another stage
        if kept is None:
            kept = parameter_at(model, names[parameter])
        shares[parameter] = share.to(kept.dtype)


def _around_local(
    model: nn.Module,
    whole: Any,
    config: Any,
    name: str,
    held: Sequence[AdapterParameter],
    beside: Adapters | None,
) -> Any:
    """Return PEFT's model around this rank's ``model``, with the adapters of the modules on this rank, ``held``."""
    if config.is_prompt_learning:
        return around_local(model, whole, name, held)
    here = narrowed(config, *targets_of(held))
    for option in ("init_lora_weights", "init_weights", "init_ia3_weights"):
        # Values are set later, because some values cannot be computed from shards of a weight.
        if hasattr(here, option):
            setattr(here, option, False)
    with ExitStack() as stack:
        stack.enter_context(shown_decoded(model))
        known: Any = model
        if beside is not None:
            known = beside.peft_model
            # PEFT compares the adapters' names of experts' parameters, but here these names are full paths.
            for other in known.peft_config.values():
                named = getattr(here, "target_parameters", None)
                stack.enter_context(attribute_replaced(other, "target_parameters", named))
        local = quietly(known, here, name, beside is not None)
        wrap_local(model, held)
    return local


def _give_local_shapes(
    model: nn.Module,
    plan: Plan,
    adapters: Sequence[AdapterParameter],
    mesh: Mesh,
    shares: dict[str, Tensor],
    autocast: bool,
) -> None:
    """Give every parameter of ``adapters``, this rank's adapters, the plan's local shape, and the dtype that PEFT would
    give to a real parameter.
    """
    here = dict(model.named_parameters(remove_duplicate=False))
    made: dict[str, nn.Parameter] = {}
    for adapter in adapters:
        if adapter.name not in here:
            raise PlanError(
                f"PEFT did not create the parameter {adapter.name}, which hfscale's plan places on this rank: report "
                "this with the peft_config"
            )
        planned = plan.by_name[adapter.name]
        old = here[adapter.name]
        shape = planned.model_shape(mesh.ranks)
        if tuple(old.shape) != shape and adapter.kept_in != LORA_EMBEDDING_A:
            raise PlanError(
                f"{adapter.name} must have the shape {shape} on this rank, but PEFT created {tuple(old.shape)}: report "
                "this with the peft_config"
            )
        owner = adapter.first_name
        if owner not in made:
            kind = adapter.dtype
            if adapter.kept_in not in IN_FRONT:
                kind = _type_of(model, plan, adapter, shares, autocast)
            empty = torch.empty(shape, dtype=kind, device="meta")
            made[owner] = nn.Parameter(empty, requires_grad=old.requires_grad)
        holder, attribute = owner_of(model, adapter.name)
        setattr(holder, attribute, made[owner])


def _type_of(
    model: nn.Module,
    plan: Plan,
    adapter: AdapterParameter,
    shares: Mapping[str, Tensor],
    autocast: bool,
) -> torch.dtype:
    module, attribute = owner_of(model, adapter.base)
    encoding = encodings_of(module).get(attribute)
    kept = shares[plan.by_name[adapter.base].first_name]
    base = kept.dtype if encoding is None else encoding.dtype
    # PEFT leaves factors of quantized weights in float32.
    return type_beside(base, adapter.kept_in, autocast or encoding is not None)


def _place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the wrappers' other tensors, which PEFT creates on the CPU (for example, indices of OFT), to ``device``."""
    wrappers = (module for module in model.modules() if unwrapped(module) is not module)
    for inner in (each for wrapper in wrappers for each in wrapper.modules()):
        held = own_buffers(inner)
        for name, buffer in held.items():
            if buffer is not None and not buffer.is_meta:
                held[name] = buffer.to(device)


@dataclass(frozen=True)
class _NewAdapters:
    """Let PEFT compute the initial values of adapters, on one full module at a time. ``shares`` are this rank's shards
    of the model's weights, by name; ``dequantized`` returns the shard of a quantized weight.
    """

    config: Any
    name: str
    plan: Plan
    mesh: Mesh
    shares: dict[str, Tensor]
    dequantized: Callable[[str], Tensor]

    def values(
        self, stock: nn.Module, adapters: Sequence[AdapterParameter], seed: int | None
    ) -> dict[str, Tensor]:
        """Return this rank's shards of ``adapters``, and of weights that their initialization has changed. ``stock`` is
        the full model on the meta device; without a ``seed``, torch's current RNG state is used.
        """
        plan = self.plan
        mesh = self.mesh
        failure: Exception | None = None
        here = plan.local_names(mesh.pp_rank)
        made: dict[str, Tensor] = {}
        by_module: dict[str, list[AdapterParameter]] = {}
        for adapter in adapters:
            if adapter.kept_in not in (*COPIES, TOKEN_ROWS):
                by_module.setdefault(adapter.module, []).append(adapter)
            elif adapter.kept_in in COPIES and plan.is_local(mesh.pp_rank, adapter.name):
                made[adapter.first_name] = self.shares[
                    plan.by_name[adapter.base].first_name
                ].clone()
        with _random_numbers(seed, mesh):
            for path in sorted(
                by_module, key=lambda each: any(adapter.experts for adapter in by_module[each])
            ):
                module = copy.deepcopy(unwrapped(stock.get_submodule(path))).to_empty(device="cpu")
                # If modules share a vector, the first module initializes it.
                local = any(adapter.name in here for adapter in by_module[path])
                weights = self._fill(module, path) if local and needs_weights(self.config) else {}
                try:
                    if local:
                        made |= self._of_module(module, path, by_module[path], weights)
                    else:
                        self._advance_random(module, path, by_module[path])
                except (ValueError, RuntimeError) as error:  # other ranks wait for further shards
                    failure = failure or error
        with all_or_none(mesh, NOT_ADDED):
            if failure is not None:
                raise failure
        return made

    def _of_module(
        self,
        module: nn.Module,
        path: str,
        adapters: list[AdapterParameter],
        weights: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        before = {key: getattr(module, key).detach().clone() for key in weights}
        values = inject_alone(self.config, self.name, module, path, adapters)
        full = {
            adapter.name: values[adapter.name].detach()
            for adapter in adapters
            if not self.plan.by_name[adapter.name].tied_to
        }
        for key, old in before.items():
            new = getattr(module, key).detach()
            if not torch.equal(new, old):
                owner = self.plan.by_name[f"{path}.{key}"].first_name
                kept = weights[key]
                full[owner] = kept + (new - old).to(kept.dtype) if new.dtype != kept.dtype else new
        ranks = self.mesh.ranks
        device = self.mesh.device
        return {
            key: self.plan.by_name[key].take(value, ranks).clone().to(device)
            for key, value in full.items()
        }

    def _advance_random(
        self, module: nn.Module, path: str, adapters: list[AdapterParameter]
    ) -> None:
        """Draw the random numbers for a module's adapters that are on another stage, without keeping them, so that the
        RNG advances as on that stage.
        """
        config = copy.deepcopy(self.config)
        config.use_dora = False  # magnitudes are computed from weights, without random numbers
        if getattr(config, "init_lora_weights", True) in DECOMPOSING:
            config.init_lora_weights = False  # these initial values also need no random numbers
        if needs_weights(config):
            for parameter in module.parameters():
                parameter.data.zero_()
        inject_alone(config, self.name, module, path, adapters)

    def _fill(self, module: nn.Module, path: str) -> dict[str, Tensor]:
        """Fill the stock ``module`` at ``path`` with the model's full weights, gathered over ranks; return these
        weights in their own dtype, by name within the module.
        """
        weights = {}
        for key, parameter in module.named_parameters(recurse=False):
            planned = self.plan.by_name[f"{path}.{key}"]
            name = planned.name
            share = (
                self.dequantized(name)
                if name in self.plan.quantized_weights
                else self.shares[planned.first_name]
            )
            weights[key] = gather_full(
                share.contiguous(), planned.shape, planned.cuts, self.mesh
            ).cpu()
            # PEFT's decompositions do not support float64.
            narrows = share.dtype == torch.float64 and not starts_by_products(self.config)
            narrow = torch.float32 if narrows else share.dtype
            parameter.data = weights[key].to(narrow, copy=True)
        return weights


@contextmanager
def _random_numbers(seed: int | None, mesh: Mesh) -> Iterator[None]:
    """Use the same RNG state on every rank inside the ``with`` block: from ``seed``, or, without a seed, the first
    rank's state, which then advances.
    """
    own = torch.random.get_rng_state()
    start = mesh.all_gather_object(
        own if seed is None else torch.Generator().manual_seed(seed).get_state()
    )[0]
    torch.random.set_rng_state(start)
    try:
        yield
        if seed is None and torch.equal(own, start):
            own = torch.random.get_rng_state()
    finally:
        torch.random.set_rng_state(own)
